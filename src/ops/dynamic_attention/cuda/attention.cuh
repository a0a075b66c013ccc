// Attention's portable kernels on walks that the device made.
#pragma once

#include "ops/attention/cuda/portable.cuh"
#include "ops/attention/cuda/portable_backward.cuh"
#include "ops/attention/cuda/simple.cuh"
#include "ops/dynamic_attention/cuda/walk.cuh"
