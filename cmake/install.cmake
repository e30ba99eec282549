# Install rules and the package that find_package(flashport) finds.
include(CMakePackageConfigHelpers)

install(TARGETS flashport EXPORT flashport-targets COMPONENT cpp)
foreach(backend IN ITEMS cuda hip)
  if(TARGET flashport_${backend})
    # In the folder of the library, where it looks for backends.
    install(TARGETS flashport_${backend} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp)
  endif()
endforeach()
install(DIRECTORY common/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT cpp)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flashport)
install(EXPORT flashport-targets NAMESPACE flashport:: DESTINATION ${package_dir} COMPONENT cpp)
configure_package_config_file(cmake/flashport-config.cmake.in "${PROJECT_BINARY_DIR}/flashport-config.cmake"
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file("${PROJECT_BINARY_DIR}/flashport-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/flashport-config.cmake" "${PROJECT_BINARY_DIR}/flashport-config-version.cmake"
        DESTINATION ${package_dir} COMPONENT cpp)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT cpp)
