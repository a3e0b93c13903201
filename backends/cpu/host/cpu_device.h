// The CPU backend. It is plain and threaded, and defines what every op computes.
#pragma once

#include <memory>

#include "backends/backend.h"

namespace thimble {

// A segment with an estimated time above `part_seconds` is run in parts that take less. Even if other
// programs make the processor three or four times slower, a part then ends within 100 ms.
Result<std::shared_ptr<Device>> open_cpu_device(uint32_t threads, double part_seconds = 0.025);
DeviceInfo cpu_device_info();

}  // namespace thimble
