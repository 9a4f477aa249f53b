// Mixtures of experts: which experts a row goes to, and what they make of it. The rows
// of a step are listed by expert, so that each expert's weights are read once however
// many rows go there; what comes of a row is summed up in the order of its own routing,
// and so does not depend on what else is in the step.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "experts_work.h"
#include "tiles.h"

namespace headrace {
namespace {

// Scores are computed in double precision: in float, those of a sigmoid are all 1 from
// 17 on.
class Route : public Op {
 public:
  explicit Route(const RouteArgs& args) : Op("route"), a_(args) {}

  int items(const Plan& plan, const Step& step) override {
    return Plan::rows_of(plan.buffer(a_.out), step);
  }

  void run(const Plan& plan, const Step&, int begin, int end, int) override {
    const Buffer& x = plan.buffer(a_.x);
    for (int row = begin; row < end; row++)
      route(x.row(row), x.width, plan.vector(a_.bias), plan.buffer(a_.out).row(row));
  }

 private:
  // Working memory of a thread.
  struct Scratch {
    std::vector<double> scores, wanted, best;
    std::vector<int> order;
  };

  void route(const float* logits, int experts, const float* bias, float* out) const {
    thread_local Scratch s;
    const bool chooses = score(logits, experts, bias, s);
    if (chooses && a_.groups > 1) keep_groups(experts / a_.groups, s);
    if (chooses) best(s.wanted, a_.top_k, s.order);
    double sum = 0;
    for (int k = 0; k < a_.top_k && chooses; k++) sum += s.scores[s.order[k]];
    for (int k = 0; k < a_.top_k;
         k++) {  // a row that cannot choose goes to the first experts, with weights that spoil it
      out[k] = static_cast<float>(chooses ? s.order[k] : k);
      const double weight = chooses ? s.scores[s.order[k]] / (a_.normalised ? sum : 1.0)
                                    : std::numeric_limits<double>::quiet_NaN();
      out[a_.top_k + k] = static_cast<float>(weight * a_.factor);
    }
  }

  // Whether all logits are finite, and so are the scores that experts are chosen by.
  bool score(const float* logits, int experts, const float* bias, Scratch& s) const {
    const double highest = *std::max_element(logits, logits + experts);
    s.scores.resize(experts), s.wanted.resize(experts);
    double sum = 0;
    for (int e = 0; e < experts; e++) {
      if (!std::isfinite(logits[e])) return false;
      s.scores[e] = a_.sigmoid ? 1 / (1 + std::exp(-static_cast<double>(logits[e])))
                               : std::exp(logits[e] - highest);
      sum += s.scores[e];
    }
    for (int e = 0; e < experts; e++) {
      if (!a_.sigmoid) s.scores[e] /= sum;
      s.wanted[e] = bias ? s.scores[e] + bias[e] : s.scores[e];
      if (!std::isfinite(s.wanted[e])) return false;
    }
    return true;
  }

  // Takes the experts of all but the best groups, of `size` each, out of the choice.
  void keep_groups(int size, Scratch& s) const {
    s.best.resize(a_.groups);
    for (int g = 0; g < a_.groups; g++) {
      double first = -std::numeric_limits<double>::infinity(), second = first;
      for (int e = g * size; e < (g + 1) * size; e++) {
        second = std::max(second, std::min(first, s.wanted[e]));
        first = std::max(first, s.wanted[e]);
      }
      s.best[g] = a_.sigmoid && size > 1 ? first + second : first;
    }
    best(s.best, a_.groups, s.order);
    for (int i = a_.top_groups; i < a_.groups; i++)
      std::fill_n(s.wanted.begin() + s.order[i] * size, size,
                  -std::numeric_limits<double>::infinity());
  }

  // The numbers of the `count` highest values, highest first, and of equal ones the
  // lower number.
  static void best(const std::vector<double>& values, int count, std::vector<int>& order) {
    order.resize(values.size());
    for (size_t i = 0; i < values.size(); i++) order[i] = static_cast<int>(i);
    std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int a, int b) {
      return values[a] > values[b] || (values[a] == values[b] && a < b);
    });
  }

  const RouteArgs a_;
};

// What comes of the choices of each row, one after the other, summed up in the order of
// the row's routing.
void combine_rows(const Plan& plan, const float* results, int routing, int out, int begin,
                  int end) {
  const Buffer &to = plan.buffer(out), &by = plan.buffer(routing);
  const int top_k = by.width / 2;
  for (int row = begin; row < end; row++)
    plan.kernels().combine(results + static_cast<size_t>(row) * top_k * to.width,
                           by.row(row) + top_k, top_k, to.width, to.row(row));
}

class Combine : public Op {
 public:
  Combine(int out, int x, int routing) : Op("combine"), out_(out), x_(x), routing_(routing) {}

  int items(const Plan& plan, const Step& step) override {
    return Plan::rows_of(plan.buffer(out_), step);
  }
  void run(const Plan& plan, const Step&, int begin, int end, int) override {
    combine_rows(plan, plan.buffer(x_).floats, routing_, out_, begin, end);
  }

 private:
  const int out_, x_, routing_;
};

// An op over experts. Its regions run one after the other, over blocks of rows that go
// to one expert.
class Experts {
 public:
  Experts(ExpertsArgs args, ExpertsWork& work)
      : a_(std::move(args)), work_(work), loads_(static_cast<size_t>(a_.num_experts)) {}

  std::span<const int64_t> loads() const { return loads_; }

  // Each block's rows in the form of its weights. The blocks of a single row are all
  // alike: one is packed for all.
  int pack_items(const Plan& plan, const Step& step) {
    const int rows = Plan::rows_of(plan.buffer(a_.x), step);
    work_.prepare(plan.buffer(a_.routing), rows, plan.kernels().max_rows, loads_, a_.first,
                  static_cast<int>(a_.gate.size()));
    is_single_ = rows == 1 && num_blocks() == work_.top_k;
    return is_single_ ? 1 : num_blocks();
  }
  void pack(const Plan& plan, int begin, int end) const {
    const Buffer &x = plan.buffer(a_.x), &packed = plan.buffer(work_.packed);
    const Form gate = form(plan, a_.gate), up = form(plan, a_.up);
    for (int b = begin; b < end; b++) {
      const ExpertBlock& block = work_.blocks[b];
      for (int m = 0; m < block.rows; m++) {
        const float* row = x.row(work_.routed[block.first + m].row);
        pack_row(plan, packed, gate, block, m, row);
        if (up != gate) pack_row(plan, packed, up, block, m, row);
      }
    }
  }

  // Gate and up, 32 columns at a time, into packed rows; into floats where a whole row
  // must be there to be packed.
  int hidden_items(const Plan& plan, const Step&) {
    return work_.items(plan.buffer(work_.hidden).columns / kGroup);
  }
  void hidden(const Plan& plan, int begin, int end) const {
    const Buffer &x = plan.buffer(work_.packed), &packed = plan.buffer(work_.hidden),
                 &loose = plan.buffer(work_.loose_hidden);
    const Form gate = form(plan, a_.gate), up = form(plan, a_.up), down = form(plan, a_.down);
    alignas(64) float rows[kMaxBlockRows * kGroup];
    work_.each(packed.columns / kGroup, begin, end, [&](const ExpertBlock& block, int group) {
      const int first = kGroup * group, n = std::clamp(packed.width - first, 0, kGroup),
                e = block.expert;
      const ExpertBlock from = is_single_ ? work_.blocks[0] : block;
      const GatedUnit unit{plan.weight(a_.gate[e]), plan.weight(a_.up[e]),
                           bias(plan, a_.gate_bias, e), bias(plan, a_.up_bias, e)};
      gated_group(plan, unit, group, at(x, gate, from), at(x, up, from), block.rows, a_.activate,
                  rows);
      if (!is_by_row(down)) return pack_piece(plan, packed, down, block, first, rows, n);
      for (int m = 0; m < block.rows && n; m++)
        std::memcpy(loose.row(block.first + m) + first, rows + kGroup * m,
                    static_cast<size_t>(n) * 4);
    });
  }

  int hidden_pack_items(const Plan& plan, const Step&) {
    return is_by_row(form(plan, a_.down)) ? num_blocks() : 0;
  }
  void hidden_pack(const Plan& plan, int begin, int end) const {
    const Buffer &loose = plan.buffer(work_.loose_hidden), &packed = plan.buffer(work_.hidden);
    for (int b = begin; b < end; b++) {
      const ExpertBlock& block = work_.blocks[b];
      for (int m = 0; m < block.rows; m++)
        pack_row(plan, packed, form(plan, a_.down), block, m, loose.row(block.first + m));
    }
  }

  // Rows of the result, each to its place.
  int down_items(const Plan& plan, const Step&) {
    return work_.items(plan.weight(a_.down[0]).tiles());
  }
  void down(const Plan& plan, int begin, int end) const {
    const Buffer &hidden = plan.buffer(work_.hidden), &result = plan.buffer(work_.result);
    float* const results = a_.combines ? result.floats : plan.buffer(a_.out).floats;
    const Form down = form(plan, a_.down);
    alignas(64) float tile[kMaxBlockRows * 16];
    work_.each(plan.weight(a_.down[0]).tiles(), begin, end, [&](const ExpertBlock& block, int t) {
      const Weight& w = plan.weight(a_.down[block.expert]);
      multiply(plan, w, t, false, at(hidden, down, block), block.rows,
               bias(plan, a_.down_bias, block.expert), tile);
      const int n = std::min(kTileRows, w.rows - kTileRows * t);
      for (int m = 0; m < block.rows; m++) {
        float* to = results +
                    static_cast<size_t>(work_.routed[block.first + m].place) * result.width +
                    kTileRows * t;
        plan.kernels().finish_tile(tile + kTileRows * m, 1, n, nullptr, 0, to, result.width);
      }
    });
  }

  bool combines() const { return a_.combines; }
  int combine_items(const Plan& plan, const Step& step) {
    return Plan::rows_of(plan.buffer(a_.out), step);
  }
  void combine(const Plan& plan, int begin, int end) const {
    combine_rows(plan, plan.buffer(work_.result).floats, a_.routing, a_.out, begin, end);
  }

 private:
  int num_blocks() const { return static_cast<int>(work_.blocks.size()); }

  // The form of what these weights, all alike in this, are multiplied with.
  static Form form(const Plan& plan, const std::vector<int>& weights) {
    return plan.form(plan.weight(weights[0]), false);
  }

  static const float* bias(const Plan& plan, const std::vector<int>& biases, int expert) {
    return biases.empty() ? nullptr : plan.vector(biases[expert]);
  }

  static uint8_t* at(const Buffer& buffer, Form form, const ExpertBlock& block) {
    return buffer.forms[static_cast<int>(form)] +
           block.first * form_row_bytes(form, buffer.columns);
  }

  static void pack_row(const Plan& plan, const Buffer& to, Form form, const ExpertBlock& block,
                       int m, const float* x) {
    plan.kernels().pack[static_cast<int>(form)](x, 0, 1, to.width, to.columns, at(to, form, block),
                                                block.rows, m);
  }

  static void pack_piece(const Plan& plan, const Buffer& to, Form form, const ExpertBlock& block,
                         int first, const float* x, int n) {
    uint8_t* piece = at(to, form, block) + form_column_bytes(form, first) * block.rows;
    plan.kernels().pack[static_cast<int>(form)](x, kGroup, block.rows, n, kGroup, piece, block.rows,
                                                0);
  }

  const ExpertsArgs a_;
  ExpertsWork& work_;
  std::vector<int64_t> loads_;
  bool is_single_ = false;
};

class ExpertsRegion : public Op {
 public:
  using Items = int (Experts::*)(const Plan&, const Step&);
  using Run = void (Experts::*)(const Plan&, int begin, int end) const;
  ExpertsRegion(std::shared_ptr<Experts> experts, Items items, Run run)
      : Op("experts"), experts_(std::move(experts)), items_(items), run_(run) {}

  int items(const Plan& plan, const Step& step) override { return (*experts_.*items_)(plan, step); }
  void run(const Plan& plan, const Step&, int begin, int end, int) override {
    (*experts_.*run_)(plan, begin, end);
  }
  std::span<const int64_t> expert_loads() const override {
    return items_ == &Experts::pack_items ? experts_->loads() : Op::expert_loads();
  }

 private:
  const std::shared_ptr<Experts> experts_;
  const Items items_;
  const Run run_;
};

}  // namespace

std::unique_ptr<Op> make_route(const RouteArgs& args) { return std::make_unique<Route>(args); }

std::unique_ptr<Op> make_combine(int out, int x, int routing) {
  return std::make_unique<Combine>(out, x, routing);
}

std::vector<std::unique_ptr<Op>> make_experts(ExpertsArgs args, ExpertsWork& work) {
  const auto experts = std::make_shared<Experts>(std::move(args), work);
  std::vector<std::unique_ptr<Op>> regions;
  const auto add = [&](ExpertsRegion::Items items, ExpertsRegion::Run run) {
    regions.push_back(std::make_unique<ExpertsRegion>(experts, items, run));
  };
  add(&Experts::pack_items, &Experts::pack);
  add(&Experts::hidden_items, &Experts::hidden);
  add(&Experts::hidden_pack_items, &Experts::hidden_pack);
  add(&Experts::down_items, &Experts::down);
  if (experts->combines()) add(&Experts::combine_items, &Experts::combine);
  return regions;
}

}  // namespace headrace
