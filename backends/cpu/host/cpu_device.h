// The CPU backend: plain, threaded, and the definition of what every op computes.
#pragma once

#include <memory>

#include "backends/backend.h"

namespace thimble {

// `part_seconds`: a segment that is estimated to take longer is run in parts that do not. A processor that
// others use too takes three or four times as long, and still ends a part within 100 ms.
Result<std::shared_ptr<Device>> open_cpu_device(uint32_t threads, double part_seconds = 0.025);
DeviceInfo cpu_device_info();

}  // namespace thimble
