// A session on a recording device, so that its selections and its retention scores can be read.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "tests/support/sessions.h"
#include "tests/support/spy_device.h"

namespace thimble::test {

struct Watched {
  std::shared_ptr<SpyDevice> device;
  std::unique_ptr<Session> session;
  Watched(const std::shared_ptr<const Model>& model, const SessionOptions& options,
          const std::shared_ptr<Device>& on = cpu())
      : device(std::make_shared<SpyDevice>(on)), session(open_session(model, options, device)) {}
  Session* operator->() { return session.get(); }
  Session& operator*() { return *session; }

  // The lists that each layer made for the last decoded token: [layer][kv head][entries]. Layers that attend
  // to all entries have none.
  std::vector<std::vector<std::vector<uint32_t>>> lists() {
    std::vector<std::vector<std::vector<uint32_t>>> all(session->model().shape.layers);
    // Later programs overwrite earlier ones; that for a generated token is the last
    for (const TopK& op : device->selections)
      all[session->model().layer_of_run[op.p.head_state]] = read_lists(*device, op);
    return all;
  }

  // The retention scores in the pool by position, for one head.
  std::map<int32_t, float> scores(uint32_t layer, uint32_t head) {
    for (const CisStore& op : device->scores) {
      if (op.p.into == kIntoChunk || op.p.layer != layer) continue;
      std::vector<float> cis(must(session->kept_count(layer, head)));
      std::vector<int32_t> pos(cis.size());
      must(session->kept(layer, head, pos));
      const uint64_t first =
          session->runs()[session->model().layers[layer].attention()->first_run + head].first;
      must(device->read(cis.data(), op.cis.slice(first * sizeof(float), cis.size() * sizeof(float))));
      std::map<int32_t, float> by_position;
      for (size_t i = 0; i < cis.size(); ++i) by_position[pos[i]] = cis[i];
      return by_position;
    }
    return {};
  }
};

}  // namespace thimble::test
