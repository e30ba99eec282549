// In place of CUDA's own, for the test of producers: warps_target.h has what they use of it.
#pragma once
