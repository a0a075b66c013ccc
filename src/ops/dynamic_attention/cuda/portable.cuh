// Attention's forward kernel on walks that the device made.
#pragma once

#include "ops/attention/cuda/portable.cuh"
#include "ops/dynamic_attention/cuda/walk.cuh"
