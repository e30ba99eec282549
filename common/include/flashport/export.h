// Marks what the shared library offers to its users; everything else in it is hidden.
#pragma once

#if defined(__GNUC__)
#define FLASHPORT_API __attribute__((visibility("default")))
#else
#define FLASHPORT_API
#endif
