#!/bin/sh
# A compiler without C++20, for the test of the configuration: the one in FLASHPORT_CXX, which takes it for C++17.
count=$#
while [ "$count" -gt 0 ]; do
  case $1 in
    -std=*20 | -std=*2a) set -- "$@" -std=c++17 ;;
    *) set -- "$@" "$1" ;;
  esac
  shift
  count=$((count - 1))
done
exec "$FLASHPORT_CXX" "$@"
