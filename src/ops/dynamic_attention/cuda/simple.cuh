// Attention in fp32 on walks that the device made.
#pragma once

#include "ops/attention/cuda/simple.cuh"
#include "ops/dynamic_attention/cuda/walk.cuh"
