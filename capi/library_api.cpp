// Entry points for the library itself: version, status codes, devices.
#include "backends/registry.h"
#include "capi/guard.h"

using namespace thimble;
using namespace thimble::capi;

#define STRING_OF(x) #x
#define STRING(x) STRING_OF(x)
#define VERSION \
  STRING(THIMBLE_VERSION_MAJOR) "." STRING(THIMBLE_VERSION_MINOR) "." STRING(THIMBLE_VERSION_PATCH)

#if defined(__clang__)
#define COMPILER \
  "clang++ " STRING(__clang_major__) "." STRING(__clang_minor__) "." STRING(__clang_patchlevel__)
#else
#define COMPILER "g++ " STRING(__GNUC__) "." STRING(__GNUC_MINOR__) "." STRING(__GNUC_PATCHLEVEL__)
#endif

// The status codes of the C header equal those of base/status.h.
#define X(name, c_name, value, text) static_assert(THIMBLE_##c_name == value);
THIMBLE_STATUS_CODES(X)
#undef X

const char* thimble_version(void) { return VERSION; }

uint32_t thimble_abi_version(void) { return THIMBLE_ABI; }

const char* thimble_build_info(void) {
  static const std::string info = std::string("thimble " VERSION ", " COMPILER ", ") + backend_names();
  return info.c_str();
}

const char* thimble_status_name(thimble_status status) { return code_name(static_cast<Code>(status)); }

const char* thimble_status_text(thimble_status status) { return code_text(static_cast<Code>(status)); }

thimble_status thimble_device_count(uint32_t* count, thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need(count, "count"));
    *count = static_cast<uint32_t>(list_devices().size());
    return {};
  });
}

thimble_status thimble_device_get(uint32_t index, thimble_device_info* info, thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need_struct(info, "info"));
    const std::vector<DeviceInfo> devices = list_devices();
    if (index >= devices.size())
      return error(Code::kInvalidArgument, "device %u was asked for; there are %zu, counted from 0", index,
                   devices.size());
    const DeviceInfo& device = devices[index];
    thimble_device_info value = {};
    value.total_bytes = device.total_bytes;
    value.free_bytes = device.free_bytes;
    copy_text(value.name, sizeof value.name, device.name);
    copy_text(value.description, sizeof value.description, device.description);
    write_struct(info, value);
    return {};
  });
}

thimble_status thimble_device_measure(const char* device, uint32_t threads, thimble_device_rates* rates,
                                      thimble_error* out) {
  return guard(out, [&]() -> Status {
    THIMBLE_TRY(need_struct(rates, "rates"));
    THIMBLE_LET(opened, open_device(device ? device : "auto", {.threads = threads}));
    THIMBLE_LET(measured, opened->measure());
    thimble_device_rates value = {};
    value.bytes_per_second = measured.bytes_per_second;
    value.flop_per_second = measured.flop_per_second;
    write_struct(rates, value);
    return {};
  });
}
