// The memory of plans: bounded, least recently used, threads, pins.
#include "runtime/plan_cache.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

namespace fretwork {
namespace {

/// Counts itself.
struct Plan {
  explicit Plan(int n, std::atomic<int>* alive) : number(n), living(alive) { ++*living; }
  Plan(Plan&& other) noexcept : number(other.number), living(other.living) { ++*living; }
  ~Plan() { --*living; }
  int number;
  std::atomic<int>* living;
};

Hash128 key(int n) { return hash128(std::to_string(n)); }

TEST(PlanCache, MakesOnceAndKeeps) {
  std::atomic<int> alive = 0;
  int made = 0;
  PlanCache<Plan> cache(4);
  const auto make = [&] { return Plan(++made, &alive); };
  const auto first = cache.get(key(1), make);
  EXPECT_EQ(cache.get(key(1), make), first);
  EXPECT_NE(cache.get(key(2), make), first);
  EXPECT_EQ(made, 2);
}

TEST(PlanCache, LeastRecentlyUsedGoesFirst) {
  std::atomic<int> alive = 0;
  int made = 0;
  PlanCache<Plan> cache(3);
  const auto touch = [&](int n) {
    const int before = made;
    EXPECT_EQ(cache.get(key(n), [&] { return ++made, Plan(n, &alive); })->number, n);
    return made == before;  // was there
  };
  touch(1), touch(2), touch(3);
  EXPECT_TRUE(touch(1));
  EXPECT_FALSE(touch(4));  // 2 goes
  EXPECT_EQ(alive, 3);
  EXPECT_TRUE(touch(1));
  EXPECT_TRUE(touch(3));
  EXPECT_FALSE(touch(2));
  for (int n = 0; n < 1000; ++n) {
    touch(n);
  }
  EXPECT_EQ(alive, 3);
}

TEST(PlanCache, IsBoundedInBytes) {
  struct Sized {
    std::size_t size;
    std::size_t bytes() const { return size; }
  };
  int made = 0;
  PlanCache<Sized> cache(100, 1000);
  const auto touch = [&](int n, std::size_t size) {
    const int before = made;
    cache.get(key(n), [&] { return ++made, Sized{size}; });
    return made == before;  // was there
  };
  touch(1, 400), touch(2, 400), touch(3, 200);
  EXPECT_TRUE(touch(1, 400));  // exactly full
  touch(4, 500);               // 2 and 3 go, as 2 alone is not enough
  EXPECT_TRUE(touch(1, 400));
  EXPECT_FALSE(touch(2, 50));
  EXPECT_FALSE(touch(3, 50));
  touch(5, 5000);  // all others go; it stays until the next
  EXPECT_TRUE(touch(5, 5000));
  EXPECT_FALSE(touch(1, 400));
  EXPECT_FALSE(touch(5, 10));
  EXPECT_TRUE(touch(1, 400));  // what went is not counted
}

TEST(PlanCache, UsersAndPinsKeepAPlanAlive) {
  std::atomic<int> alive = 0;
  PlanCache<Plan> cache(1);
  const auto get = [&](int n) { return cache.get(key(n), [&] { return Plan(n, &alive); }); };
  auto held = get(1);
  cache.pin(get(2));
  cache.pin(get(2));
  get(3);
  EXPECT_EQ(alive, 3);
  EXPECT_EQ(held->number, 1);
  held.reset();
  EXPECT_EQ(alive, 2);
}

TEST(PlanCache, AFailedMakeLeavesNothing) {
  std::atomic<int> alive = 0;
  PlanCache<Plan> cache(2);
  EXPECT_THROW(cache.get(key(1), []() -> Plan { throw std::runtime_error("no"); }), std::runtime_error);
  EXPECT_EQ(cache.get(key(1), [&] { return Plan(7, &alive); })->number, 7);
}

/// Asks the cache again while it dies, as nothing should, to show that no lock is held then.
struct Nosy {
  PlanCache<Nosy>* cache = nullptr;
  ~Nosy() {
    if (cache != nullptr) {
      cache->get(key(-1), [] { return Nosy{}; });
    }
  }
  Nosy() = default;
  explicit Nosy(PlanCache<Nosy>* c) : cache(c) {}
  Nosy(Nosy&& other) noexcept : cache(std::exchange(other.cache, nullptr)) {}
};

TEST(PlanCache, PlansDieOutsideTheLock) {
  PlanCache<Nosy> cache(2);
  cache.get(key(-1), [] { return Nosy{}; });
  cache.get(key(1), [&] { return Nosy(&cache); });
  cache.get(key(-1), [] { return Nosy{}; });
  cache.get(key(2), [] { return Nosy{}; });  // the one of key 1 dies
  SUCCEED();
}

TEST(PlanCache, Threads) {
  std::atomic<int> alive = 0;
  {
    PlanCache<Plan> cache(8);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int n = 0; n < 2000; ++n) {
          const int which = (n * (t + 1)) % 12;
          const auto plan = cache.get(key(which), [&] { return Plan(which, &alive); });
          EXPECT_EQ(plan->number, which);
          if (n % 500 == 0) {
            cache.pin(plan);
          }
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    EXPECT_LE(alive, 8 + 4 * 4);  // those kept, and as many as were pinned
  }
  EXPECT_EQ(alive, 0);
}

}  // namespace
}  // namespace fretwork
