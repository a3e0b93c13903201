// Implements `thimble devices`, which lists the devices.
#include <cstdio>

#include "apps/generation.h"
#include "apps/options.h"
#include "apps/sizes.h"

namespace app {

namespace {

int devices(bool json) {
  uint32_t count = 0;
  call(thimble_device_count, &count);
  Json list = Json::array();
  for (uint32_t i = 0; i < count; ++i) {
    thimble_device_info info = {};
    info.struct_size = sizeof info;
    call(thimble_device_get, i, &info);
    list.push_back({{"name", info.name},
                    {"description", info.description},
                    {"total_bytes", info.total_bytes},
                    {"free_bytes", info.free_bytes}});
    if (!json) {
      std::printf("%-10s %12s, %s free  %s\n", info.name, format_size(info.total_bytes).c_str(),
                  format_size(info.free_bytes).c_str(), info.description);
    }
  }
  if (json) print_json({{"devices", list}});
  return 0;
}

}  // namespace

Command add_devices(CLI::App& root) {
  static Settings settings;
  CLI::App* app = root.add_subcommand("devices", "List the devices that can run a model");
  add_json_flag(*app, settings);
  app->footer("Examples:\n  thimble devices\n  thimble devices --json");
  return {app, [] { return devices(settings.json); }};
}

}  // namespace app
