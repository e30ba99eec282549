// Marks what the shared library offers to its users; everything else in it is hidden.
#pragma once

#define FLASHPORT_API __attribute__((visibility("default")))
