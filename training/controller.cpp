#include "training/controller.h"

#include <algorithm>
#include <cmath>

namespace thimble {
namespace {

constexpr uint32_t kBlock = 8;  // rows that share each loaded weight

template <typename T>
void add_scaled(T* to, T factor, const T* from, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

template <typename T>
T sigmoid(T x) {
  return 1 / (1 + std::exp(-x));
}

// Transposes [rows][cols] to [cols][rows].
template <typename T>
std::vector<T> transposed(const T* matrix, size_t rows, size_t cols) {
  std::vector<T> out(rows * cols);
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = 0; c < cols; ++c) out[c * rows + r] = matrix[r * cols + c];
  return out;
}

}  // namespace

double controller_age(uint32_t distance) { return std::log2(1.0 + distance) / 12; }

ControllerTensors tensors_of(ControllerShape s) {
  const uint32_t w = s.width;
  ControllerTensors tensors = {{{"gru.weight_ih", 0, 3 * w, s.inputs, w},
                                {"gru.bias_ih", 0, 1, 3 * w, w},
                                {"gru.weight_hh", 0, 3 * w, w, w},
                                {"gru.bias_hh", 0, 1, 3 * w, w},
                                {"position.weight", 0, 1, w, 1},
                                {"position.bias", 0, 1, w, 1},
                                {"interaction.weight", 0, w, w, w},
                                {"interaction.bias", 0, 1, w, w},
                                {"output.weight", 0, 1, w, w},
                                {"output.bias", 0, 1, 1, w}}};
  uint64_t first = 0;
  for (ControllerTensor& tensor : tensors) {
    tensor.first = first;
    first += tensor.size();
  }
  return tensors;
}

uint64_t parameters_of(ControllerShape s) {
  const ControllerTensor last = tensors_of(s).back();
  return last.first + last.size();
}

// Arrays for the tokens of an excerpt that get gradients: [token][...]. `states` begins with the state before
// the first of them.
template <typename T>
struct ControllerNetwork<T>::Tape {
  std::vector<T> states;                // [1 + tokens][w]
  std::vector<T> reset, update, fresh;  // [w]: r, u and n
  std::vector<T> hidden;                // [w]: W_hn h + b_hn
  // [w]: derivatives of the loss by the argument of the tanh, and by z.
  std::vector<T> by_inner, by_state;
  std::vector<T> by_input,
      by_recurrent;  // [3 w]: derivatives by the two summands of the gates, W_ih x + b_ih and W_hh h + b_hh
};

template <typename T>
struct ControllerNetwork<T>::Sums {
  double loss = 0;
  // [w]: the gradient of the output's weight, and the sum over all tokens of by_inner times age.
  std::vector<T> output, aged;
  T bias = 0;
};

template <typename T>
ControllerNetwork<T>::ControllerNetwork(ControllerShape shape, std::span<const T> embeddings,
                                        ThreadPool& threads)
    : shape_(shape),
      tensors_(tensors_of(shape)),
      embeddings_(embeddings),
      threads_(threads),
      parameters_(parameters_of(shape)),
      place_of_row_(embeddings.size() / shape.inputs) {}

template <typename T>
uint64_t ControllerNetwork<T>::bytes(ControllerShape s, uint32_t tokens) {
  const uint64_t a_token = 13 * uint64_t(s.width) + 3 * uint64_t(s.width);  // the tape, and projected_
  return (tokens * a_token + 3 * parameters_of(s)) * sizeof(T);
}

// ---- forward ----

// A text has few distinct tokens, so each distinct token is multiplied with W_ih once.
template <typename T>
void ControllerNetwork<T>::prepare(std::span<const std::span<const uint32_t>> texts) {
  const uint32_t w = shape_.width, d = shape_.inputs;
  distinct_.clear();
  for (const auto& rows : texts) distinct_.insert(distinct_.end(), rows.begin(), rows.end());
  std::sort(distinct_.begin(), distinct_.end());
  distinct_.erase(std::unique(distinct_.begin(), distinct_.end()), distinct_.end());
  for (uint32_t i = 0; i < distinct_.size(); ++i) place_of_row_[distinct_[i]] = i;

  const std::vector<T> weight = transposed(part(kWeightIh), 3 * w, d);
  recurrent_ = transposed(part(kWeightHh), 3 * w, w);
  interaction_ = transposed(part(kInteractionWeight), w, w);
  slope_.assign(w, 0);
  for (uint32_t i = 0; i < w; ++i)
    add_scaled(slope_.data(), part(kPositionWeight)[i], &interaction_[size_t(i) * w], w);

  const auto count = static_cast<uint32_t>(distinct_.size());
  projected_.resize(uint64_t(count) * 3 * w);
  threads_.run((count + kBlock - 1) / kBlock, [&](uint32_t block, uint32_t) {
    const uint32_t first = block * kBlock, end = std::min(first + kBlock, count);
    for (uint32_t i = first; i < end; ++i)
      std::copy_n(part(kBiasIh), 3 * w, &projected_[uint64_t(i) * 3 * w]);
    for (uint32_t c = 0; c < d; ++c)
      for (uint32_t i = first; i < end; ++i)
        add_scaled(&projected_[uint64_t(i) * 3 * w], embeddings_[uint64_t(distinct_[i]) * d + c],
                   &weight[uint64_t(c) * 3 * w], 3 * w);
  });
}

// Stores the values of the tokens from `keep_from` on.
template <typename T>
void ControllerNetwork<T>::run(std::span<const uint32_t> rows, uint32_t keep_from, Tape& tape) const {
  const uint32_t w = shape_.width;
  const size_t kept = rows.size() - keep_from;
  tape.states.assign((1 + kept) * w, 0);
  for (auto* values : {&tape.reset, &tape.update, &tape.fresh, &tape.hidden}) values->resize(kept * w);
  std::vector<T> warm(4 * size_t(w)), gates(3 * size_t(w));
  for (uint32_t t = 0; t < rows.size(); ++t) {
    const bool keeps = t >= keep_from;
    const size_t at = keeps ? size_t(t - keep_from) * w : 0;
    const T* before = &tape.states[at];
    T* after = keeps ? &tape.states[at + w] : tape.states.data();
    T* r = keeps ? &tape.reset[at] : warm.data();
    T* u = keeps ? &tape.update[at] : &warm[w];
    T* n = keeps ? &tape.fresh[at] : &warm[2 * size_t(w)];
    T* hidden = keeps ? &tape.hidden[at] : &warm[3 * size_t(w)];
    const T* x = &projected_[uint64_t(place_of_row_[rows[t]]) * 3 * w];
    std::copy_n(part(kBiasHh), 3 * w, gates.data());
    for (uint32_t k = 0; k < w; ++k)
      add_scaled(gates.data(), before[k], &recurrent_[uint64_t(k) * 3 * w], 3 * w);
    for (uint32_t i = 0; i < w; ++i) {
      r[i] = sigmoid(x[i] + gates[i]);
      u[i] = sigmoid(x[w + i] + gates[w + i]);
      hidden[i] = gates[2 * w + i];
      n[i] = std::tanh(x[2 * w + i] + r[i] * hidden[i]);
      after[i] = (1 - u[i]) * n[i] + u[i] * before[i];
    }
  }
}

// A (z + b_p) + a: the argument of the tanh at age 0.
template <typename T>
void ControllerNetwork<T>::interact(const T* state, T* to) const {
  const uint32_t w = shape_.width;
  std::copy_n(part(kInteractionBias), w, to);
  for (uint32_t k = 0; k < w; ++k)
    add_scaled(to, state[k] + part(kPositionBias)[k], &interaction_[uint64_t(k) * w], w);
}

template <typename T>
std::vector<std::vector<T>> ControllerNetwork<T>::score(std::span<const uint32_t> rows,
                                                        std::span<const LabelledQuery> queries) {
  const uint32_t w = shape_.width;
  prepare({&rows, 1});
  Tape tape;
  run(rows, 0, tape);
  std::vector<T> inner(rows.size() * w);
  threads_.run(static_cast<uint32_t>(rows.size()), [&](uint32_t t, uint32_t) {
    interact(&tape.states[(size_t(t) + 1) * w], &inner[size_t(t) * w]);
  });
  std::vector<std::vector<T>> scores(queries.size());
  threads_.run(static_cast<uint32_t>(queries.size()), [&](uint32_t q, uint32_t) {
    scores[q].resize(queries[q].position);
    for (uint32_t t = 0; t < queries[q].position; ++t) {
      const T age = static_cast<T>(controller_age(queries[q].position - t));
      T sum = *part(kOutputBias);
      for (uint32_t i = 0; i < w; ++i)
        sum += part(kOutputWeight)[i] * std::tanh(inner[size_t(t) * w + i] + age * slope_[i]);
      scores[q][t] = sum;
    }
  });
  return scores;
}

// ---- backward ----

// Scores the tokens for all later queries. Writes by_inner, and adds to the sums.
template <typename T>
void ControllerNetwork<T>::score_and_differentiate(const Excerpt& e, double pairs, Tape& tape,
                                                   Sums& sums) const {
  const uint32_t w = shape_.width, tokens = static_cast<uint32_t>(e.rows.size()) - e.warm;
  std::vector<T> inner(w), tanhs(w);
  tape.by_inner.assign(size_t(tokens) * w, 0);
  sums.output.assign(w, 0);
  sums.aged.assign(w, 0);
  for (uint32_t t = 0; t < tokens; ++t) {
    const uint32_t position = e.first + e.warm + t;
    interact(&tape.states[(size_t(t) + 1) * w], inner.data());
    T* by_inner = &tape.by_inner[size_t(t) * w];
    for (const LabelledQuery& query : e.queries) {
      if (query.position <= position) continue;
      const T age = static_cast<T>(controller_age(query.position - position));
      T logit = *part(kOutputBias);
      for (uint32_t i = 0; i < w; ++i) {
        tanhs[i] = std::tanh(inner[i] + age * slope_[i]);
        logit += part(kOutputWeight)[i] * tanhs[i];
      }
      const bool label = std::binary_search(query.best.begin(), query.best.end(), position);
      // ln(1 + e^x) - label x, without overflow.
      sums.loss += std::max(logit, T(0)) + std::log1p(std::exp(-std::abs(logit))) - (label ? logit : 0);
      const T by_logit = (sigmoid(logit) - static_cast<T>(label)) / static_cast<T>(pairs);
      sums.bias += by_logit;
      for (uint32_t i = 0; i < w; ++i) {
        sums.output[i] += by_logit * tanhs[i];
        const T by = by_logit * part(kOutputWeight)[i] * (1 - tanhs[i] * tanhs[i]);
        by_inner[i] += by;
        sums.aged[i] += age * by;
      }
    }
  }
}

// Back-propagates from by_inner to the gates, last token first.
template <typename T>
void ControllerNetwork<T>::back_propagate(const Excerpt& e, Tape& tape) const {
  const uint32_t w = shape_.width, tokens = static_cast<uint32_t>(e.rows.size()) - e.warm;
  tape.by_state.assign(size_t(tokens) * w, 0);
  tape.by_input.resize(size_t(tokens) * 3 * w);
  tape.by_recurrent.resize(size_t(tokens) * 3 * w);
  std::vector<T> later(w, 0);  // the derivative of the later tokens' scores by a token's state
  for (uint32_t t = tokens; t-- > 0;) {
    const size_t at = size_t(t) * w;
    T* by_state = &tape.by_state[at];
    for (uint32_t i = 0; i < w; ++i)
      add_scaled(by_state, tape.by_inner[at + i], part(kInteractionWeight) + uint64_t(i) * w, w);
    T *by_x = &tape.by_input[3 * at], *by_h = &tape.by_recurrent[3 * at];
    for (uint32_t i = 0; i < w; ++i) {
      const T by = by_state[i] + later[i], r = tape.reset[at + i], u = tape.update[at + i],
              n = tape.fresh[at + i], before = tape.states[at + i];
      const T by_n = by * (1 - u) * (1 - n * n), by_r = by_n * tape.hidden[at + i] * r * (1 - r);
      by_x[i] = by_h[i] = by_r;
      by_x[w + i] = by_h[w + i] = by * (before - n) * u * (1 - u);
      by_x[2 * w + i] = by_n;
      by_h[2 * w + i] = by_n * r;
      later[i] = by * u;
    }
    for (uint32_t j = 0; j < 3 * w; ++j)
      add_scaled(later.data(), by_h[j], part(kWeightHh) + uint64_t(j) * w, w);
  }
}

// The gradients of everything after the state: position, interaction and output.
template <typename T>
void ControllerNetwork<T>::add_inner_gradients(std::span<const Excerpt> excerpts,
                                               const std::vector<Tape>& tapes, const std::vector<Sums>& sums,
                                               T* gradient) const {
  const uint32_t w = shape_.width;
  const auto of = [&](ControllerPart p) { return gradient + tensors_[p].first; };
  std::vector<T> aged(w, 0);
  for (size_t e = 0; e < excerpts.size(); ++e) {
    add_scaled(of(kOutputWeight), T(1), sums[e].output.data(), w);
    *of(kOutputBias) += sums[e].bias;
    add_scaled(aged.data(), T(1), sums[e].aged.data(), w);
    for (size_t at = 0; at < tapes[e].by_inner.size(); at += w) {
      add_scaled(of(kInteractionBias), T(1), &tapes[e].by_inner[at], w);
      add_scaled(of(kPositionBias), T(1), &tapes[e].by_state[at], w);
    }
  }
  for (uint32_t i = 0; i < w; ++i)
    add_scaled(of(kPositionWeight), aged[i], part(kInteractionWeight) + uint64_t(i) * w, w);
  threads_.run(w, [&](uint32_t i, uint32_t) {
    T* row = of(kInteractionWeight) + uint64_t(i) * w;
    for (const Tape& tape : tapes)
      for (size_t at = 0; at < tape.by_inner.size(); at += w)
        add_scaled(row, tape.by_inner[at + i], &tape.states[at + w], w);
    add_scaled(row, of(kInteractionBias)[i], part(kPositionBias), w);
    add_scaled(row, aged[i], part(kPositionWeight), w);
  });
}

template <typename T>
void ControllerNetwork<T>::add_recurrent_gradients(const std::vector<Tape>& tapes, T* gradient) const {
  const uint32_t w = shape_.width;
  threads_.run((3 * w + kBlock - 1) / kBlock, [&](uint32_t block, uint32_t) {
    const uint32_t first = block * kBlock, end = std::min(first + kBlock, 3 * w);
    for (const Tape& tape : tapes)
      for (size_t at = 0; at < tape.by_state.size(); at += w)
        for (uint32_t j = first; j < end; ++j) {
          const T by = tape.by_recurrent[3 * at + j];
          gradient[tensors_[kBiasHh].first + j] += by;
          add_scaled(gradient + tensors_[kWeightHh].first + uint64_t(j) * w, by, &tape.states[at], w);
        }
  });
}

// As in prepare(), the gradients of all occurrences of a token are summed first, and multiplied with its
// embedding once.
template <typename T>
void ControllerNetwork<T>::add_input_gradients(std::span<const Excerpt> excerpts,
                                               const std::vector<Tape>& tapes, T* gradient) const {
  const uint32_t w = shape_.width, d = shape_.inputs;
  std::vector<T> by_row(distinct_.size() * 3 * w, 0);
  for (size_t e = 0; e < excerpts.size(); ++e)
    for (size_t t = excerpts[e].warm; t < excerpts[e].rows.size(); ++t)
      add_scaled(&by_row[uint64_t(place_of_row_[excerpts[e].rows[t]]) * 3 * w], T(1),
                 &tapes[e].by_input[(t - excerpts[e].warm) * 3 * w], 3 * w);
  threads_.run((3 * w + kBlock - 1) / kBlock, [&](uint32_t block, uint32_t) {
    const uint32_t first = block * kBlock, end = std::min(first + kBlock, 3 * w);
    for (size_t i = 0; i < distinct_.size(); ++i)
      for (uint32_t j = first; j < end; ++j) {
        const T by = by_row[i * 3 * w + j];
        gradient[tensors_[kBiasIh].first + j] += by;
        add_scaled(gradient + tensors_[kWeightIh].first + uint64_t(j) * d, by,
                   &embeddings_[uint64_t(distinct_[i]) * d], d);
      }
  });
}

template <typename T>
double ControllerNetwork<T>::loss(std::span<const Excerpt> excerpts, std::span<T> gradient) {
  std::vector<std::span<const uint32_t>> texts;
  double pairs = 0;
  for (const Excerpt& e : excerpts) {
    texts.push_back(e.rows);
    for (size_t t = e.warm; t < e.rows.size(); ++t)
      pairs += static_cast<double>(std::count_if(e.queries.begin(), e.queries.end(), [&](const auto& query) {
        return query.position > e.first + t;
      }));
  }
  prepare(texts);
  std::vector<Tape> tapes(excerpts.size());
  std::vector<Sums> sums(excerpts.size());
  threads_.run(static_cast<uint32_t>(excerpts.size()), [&](uint32_t e, uint32_t) {
    run(excerpts[e].rows, excerpts[e].warm, tapes[e]);
    score_and_differentiate(excerpts[e], pairs, tapes[e], sums[e]);
    back_propagate(excerpts[e], tapes[e]);
  });
  std::fill(gradient.begin(), gradient.end(), T(0));
  add_inner_gradients(excerpts, tapes, sums, gradient.data());
  add_recurrent_gradients(tapes, gradient.data());
  add_input_gradients(excerpts, tapes, gradient.data());
  double loss = 0;
  for (const Sums& of : sums) loss += of.loss;
  return loss / pairs;
}

template class ControllerNetwork<float>;
template class ControllerNetwork<double>;

}  // namespace thimble
