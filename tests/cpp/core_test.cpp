// Views, hashes, errors and executors.
#include <gtest/gtest.h>

#include "core/hash.h"

TEST(Hash, IsStable) { EXPECT_EQ(fretwork::hash128("").hex(), "99aa06d3014798d86001c324468d497f"); }
