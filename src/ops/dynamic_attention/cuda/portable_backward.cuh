// Attention's gradients on walks that the device made.
#pragma once

#include "ops/attention/cuda/portable_backward.cuh"
#include "ops/dynamic_attention/cuda/walk.cuh"
