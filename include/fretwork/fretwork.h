// Everything a C++ program needs: tensors by view and owned, patterns, ops, contexts.
#pragma once

#include "fretwork/context.h"
#include "fretwork/device_tensor.h"
#include "fretwork/dynamic_attention.h"
#include "fretwork/error.h"
#include "fretwork/ops.h"
#include "fretwork/pattern.h"
#include "fretwork/patterns.h"
#include "fretwork/sharding.h"
#include "fretwork/tensor.h"
#include "fretwork/two_four.h"
