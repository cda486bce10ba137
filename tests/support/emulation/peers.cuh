// Emulate kernels/native/peers.cuh on a CPU, and run the launches of several ranks concurrently.
//
// Each rank has a stream of launches. A launch starts when all blocks of the launch before it let it start or have
// finished. Words for other ranks arrive late and in any order, resets may become visible only at the end of a launch,
// and ranks stall at random. Without progress, the clock jumps.

#define NOT_ARRIVED 0xffffffffu

constexpr int STUCK_ROUNDS = 4000;
constexpr i64 JUMP = 10'000'000'000;

struct Launch {
  const void *params;
  int blocks, started = 0;
  bool resets_late;
  std::list<Cluster> live;
  std::vector<int4 *> resets;
  bool lets_next_start() const {
    for (const Cluster &cluster : live)
      if (!cluster.blocks[0].lets_next_start) return false;
    return started == blocks;
  }
};
struct Stream { std::deque<Launch> launches; int next = 0, stalled = 0; };
Stream *running_stream;
Launch *running_launch;
std::vector<Word> under_way;
i64 clock_ns;

inline u32 *words_of(const int4 *at) {
  if ((uintptr_t)at % 16) fault = "an access of 16 bytes is not aligned";
  return (u32 *)at;
}
inline void store_peer(int4 *at, int4 x) {
  const int values[4] = {x.x, x.y, x.z, x.w};
  for (int i = 0; i < 4; ++i) under_way.push_back({words_of(at) + i, (u32)values[i]});
}
inline int4 load_arriving(const int4 *at) {
  const u32 *words = words_of(at);
  const int4 x = *at;
  if (std::find(words, words + 4, NOT_ARRIVED) != words + 4) yield();
  return x;
}
inline void reset(int4 *at) { memset(at, 0xff, sizeof(int4)); }
inline void store_not_arrived(int4 *at) {
  if (running_launch->resets_late) running_launch->resets.push_back(at);
  else reset(at);
}
inline int load_host(const int *at) { return *at; }
inline i64 global_time() { return clock_ns; }
inline void deliver_words(size_t count) {
  for (; count > 0; --count, ++progress) {
    std::swap(under_way[chance() % under_way.size()], under_way.back());
    *under_way.back().at = under_way.back().value;
    under_way.pop_back();
  }
}

// Run `counts[rank]` launches of each rank. `params` and `blocks` list the launches of rank 0, then of rank 1, ...
template <typename P>
const char *run_streams(const P *const *params, const int *blocks, const int *counts, int ranks, int seed) {
  seed_chance(seed);
  hooks.waits = [] { return running_launch != &running_stream->launches.front(); };
  fault = nullptr;
  std::vector<Stream> streams(ranks);
  int left = 0, rounds = 0;
  for (int rank = 0; rank < ranks; ++rank) left += counts[rank];
  const auto start_launch = [&](int rank) {
    int index = streams[rank].next++;
    for (int other = 0; other < rank; ++other) index += counts[other];
    Launch &launch = streams[rank].launches.emplace_back();
    launch.params = params[index];
    launch.blocks = blocks[index];
    launch.resets_late = chance() % 2;
  };
  for (long before = progress; left > 0 && !fault; before = progress) {
    for (int rank = 0; rank < ranks; ++rank) {
      Stream &stream = streams[rank];
      if (stream.stalled > 0) { --stream.stalled; continue; }
      if (chance() % 64 == 0) stream.stalled = chance() % 256;
      auto &launches = stream.launches;
      if (stream.next < counts[rank] && (launches.empty() || launches.back().lets_next_start())) start_launch(rank);
      running_stream = &stream;
      for (Launch &launch : launches) {
        running_launch = &launch;
        params_of_launch<P> = (const P *)launch.params;
        gridDim = {launch.blocks, 1};
        if (launch.started < launch.blocks) start<P>(launch.live.emplace_back(), launch.started++, 1);
        for (Cluster &cluster : launch.live) {
          Block &block = cluster.blocks[0];
          if (block.delay > 0) block.delay = block.delay / 2;
          else if (block.left > 0) run_pass(block);
        }
        launch.live.remove_if(has_ended);
      }
      if (!launches.empty() && launches.front().started == launches.front().blocks && launches.front().live.empty()) {
        for (int4 *at : launches.front().resets) reset(at);
        launches.pop_front();
        --left;
        ++progress;
      }
    }
    if (!under_way.empty() && chance() % 4 == 0) deliver_words(1 + chance() % under_way.size());
    rounds = progress == before ? rounds + 1 : 0;
    if (rounds % STUCK_ROUNDS == STUCK_ROUNDS - 1) clock_ns += JUMP;
    if (rounds == MAX_ROUNDS) fault = "deadlock: threads wait for each other";
  }
  deliver_words(under_way.size());
  return fault;
}
