// Which dispatches have to wait for others; decided without Vulkan.
#include "backends/vulkan/host/hazards.h"

#include <gtest/gtest.h>

#include <initializer_list>

namespace thimble::vulkan {
namespace {

const int kA = 0, kB = 0;  // two buffers

bool add(Hazards& hazards, std::initializer_list<Access> dispatch) {
  return hazards.add({dispatch.begin(), dispatch.size()});
}
Access reads(const int& buffer, uint64_t first, uint64_t end) { return {&buffer, first, end, false}; }
Access writes(const int& buffer, uint64_t first, uint64_t end) { return {&buffer, first, end, true}; }

TEST(Hazards, TheFirstDispatchWaitsForNothing) {
  Hazards hazards;
  EXPECT_FALSE(add(hazards, {reads(kA, 0, 64), writes(kA, 64, 128)}));
}

TEST(Hazards, AReadWaitsForTheWriteBeforeIt) {
  Hazards hazards;
  EXPECT_FALSE(add(hazards, {writes(kA, 0, 64)}));
  EXPECT_TRUE(add(hazards, {reads(kA, 0, 64)}));
}

TEST(Hazards, AWriteWaitsForTheReadBeforeIt) {
  Hazards hazards;
  EXPECT_FALSE(add(hazards, {reads(kA, 0, 64)}));
  EXPECT_TRUE(add(hazards, {writes(kA, 0, 64)}));
}

TEST(Hazards, AWriteWaitsForTheWriteBeforeIt) {
  Hazards hazards;
  EXPECT_FALSE(add(hazards, {writes(kA, 0, 64)}));
  EXPECT_TRUE(add(hazards, {writes(kA, 0, 64)}));
}

TEST(Hazards, ReadsDoNotWaitForReads) {
  Hazards hazards;
  EXPECT_FALSE(add(hazards, {reads(kA, 0, 64)}));
  EXPECT_FALSE(add(hazards, {reads(kA, 0, 64)}));
}

TEST(Hazards, OneCommonByteIsAHazardAndNeighboursAreNot) {
  for (const auto& [first, end, waits] :
       {std::tuple(0, 32, false), std::tuple(0, 33, true), std::tuple(63, 80, true),
        std::tuple(64, 80, false), std::tuple(40, 41, true), std::tuple(0, 100, true)}) {
    Hazards hazards;
    EXPECT_FALSE(add(hazards, {writes(kA, 32, 64)}));
    EXPECT_EQ(add(hazards, {reads(kA, first, end)}), waits) << first << " to " << end;
  }
}

TEST(Hazards, DifferentBuffersDoNotConflict) {
  Hazards hazards;
  EXPECT_FALSE(add(hazards, {writes(kA, 0, 64)}));
  EXPECT_FALSE(add(hazards, {writes(kB, 0, 64)}));
}

TEST(Hazards, OperandsOfOneDispatchMayOverlap) {
  Hazards hazards;
  EXPECT_FALSE(add(hazards, {reads(kA, 0, 64), writes(kA, 0, 64)}));
}

TEST(Hazards, ABarrierCoversAllEarlierDispatches) {
  Hazards hazards;
  EXPECT_FALSE(add(hazards, {writes(kA, 0, 64)}));
  EXPECT_FALSE(add(hazards, {writes(kB, 0, 64)}));
  EXPECT_TRUE(add(hazards, {reads(kA, 0, 64)}));
  EXPECT_FALSE(add(hazards, {reads(kB, 0, 64)})) << "the same barrier stands between";
}

TEST(Hazards, ADispatchAfterABarrierIsAlsoWaitedFor) {
  Hazards hazards;
  EXPECT_FALSE(add(hazards, {writes(kA, 0, 64)}));
  EXPECT_TRUE(add(hazards, {reads(kA, 0, 64), writes(kB, 0, 64)}));
  EXPECT_TRUE(add(hazards, {reads(kB, 0, 64)}));
}

TEST(Hazards, EveryDispatchSinceTheBarrierCounts) {
  Hazards hazards;
  EXPECT_FALSE(add(hazards, {writes(kA, 0, 64)}));
  for (uint64_t i = 1; i < 10; ++i) EXPECT_FALSE(add(hazards, {writes(kA, 64 * i, 64 * i + 64)}));
  EXPECT_TRUE(add(hazards, {reads(kA, 0, 4)}));
}

}  // namespace
}  // namespace thimble::vulkan
