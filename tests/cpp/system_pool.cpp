// The pool and its work ranges within one process.
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iostream>
#include <memory>
#include <set>
#include <thread>

#include "../../csrc/system/affinity.h"
#include "../../csrc/system/info.h"
#include "../../csrc/system/topology.h"
#include "../../csrc/system/work.h"
#include "system_test.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace system_test {

void work_ranges() {
  WorkRanges work;
  int64_t item = -1;
  CHECK(!work.next(0, item));
  for (const int64_t n : {0, 1, 7, 64, 1000}) {
    for (const int size : {1, 2, 3, 64}) {
      for (const int ranks : {1, size, size + 2}) {  // fewer and more ranks than ranges
        work.reset(n, size);
        std::vector<int> seen(static_cast<size_t>(n));
        for (bool any = true; any;) {
          any = false;
          for (int r = 0; r < ranks; ++r) {
            const int64_t likely = work.peek_next(r);
            if (!work.next(r, item)) continue;
            CHECK(item >= 0 && item < n);
            CHECK(likely == -1 || likely == item);
            ++seen[static_cast<size_t>(item)];
            any = true;
          }
        }
        CHECK_EQ(std::count(seen.begin(), seen.end(), 1), static_cast<std::ptrdiff_t>(n));
        for (int i = 0; i < 3; ++i) CHECK(!work.next(ranks - 1, item));  // stays empty
      }
    }
  }
  work.reset(10, 2);
  CHECK(work.next(0, item) && item == 0);
  CHECK_EQ(work.peek_next(0), int64_t{1});
  for (int i = 0; i < 6; ++i) CHECK(work.next(1, item));  // 5 .. 9, then one from the far end of the other range
  CHECK_EQ(item, int64_t{4});
  CHECK_EQ(work.peek_next(0), int64_t{1});
  CHECK(!thrown<std::invalid_argument>([&] { work.reset(-1, 2); }).empty());
  CHECK(!thrown<std::invalid_argument>([&] { work.reset(1, 0); }).empty());
}

void check_job(int threads) {
  constexpr int kItems = 200;
  WorkRanges first, second;
  first.reset(kItems, std::max(threads, 1));
  second.reset(kItems, std::max(threads, 1));
  std::vector<int> a(kItems), b(kItems);
  std::vector<int> ranks;
  run(
      threads, [&](int size) { ranks.resize(static_cast<size_t>(size)); },
      [&](Team& team) {
        ++ranks[static_cast<size_t>(team.rank())];
        int64_t i;
        while (first.next(team.rank(), i)) a[static_cast<size_t>(i)] = static_cast<int>(i) + 1;
        team.barrier();
        while (second.next(team.rank(), i)) b[static_cast<size_t>(i)] = a[static_cast<size_t>(kItems - 1 - i)];
        team.barrier();
      });
  for (int i = 0; i < kItems; ++i) CHECK_EQ(b[static_cast<size_t>(i)], kItems - i);
  for (const int visits : ranks) CHECK_EQ(visits, 1);
}

void pool_is_lazy() {
  CHECK(!pool_status().created);
  CHECK(thread_count() >= 1);
  CHECK(!pool_status().created);
  CHECK(system_info_json().find("\"created\": false") != std::string::npos);
  run(0, [](Team&) {});
  CHECK(pool_status().created);
  CHECK(system_info_json().find("\"created\": true") != std::string::npos);
  CHECK(!thrown<std::invalid_argument>([] { run(-1, [](Team&) {}); }).empty());
  CHECK(!thrown<std::invalid_argument>([] { set_thread_count(0); }).empty());
  CHECK(!thrown<std::invalid_argument>([] { set_thread_count(kMaxThreads + 1); }).empty());
}

void pool_sizes() {
  for (const int n : {1, 2, 3, 5, 8, 16, 33, 64, 4, 1}) {
    set_thread_count(n);
    CHECK_EQ(thread_count(), n);
    std::atomic<int> size{0};
    run(0, [&](Team& team) { size = team.size(); });
    CHECK_EQ(size.load(), n);
    CHECK_EQ(static_cast<int>(pool_status().workers.size()), n - 1);
    for (int i = 0; i < 20; ++i) check_job(0);
    for (int t = 1; t <= n + 1; ++t) check_job(t);  // part of the pool, and more than it has
  }
  // Workers that sleep through jobs not meant for them still get the next one.
  set_thread_count(4);
  for (int round = 0; round < 5; ++round) {
    check_job(4);
    for (int i = 0; i < 200; ++i) check_job(2);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    check_job(4);
  }
}

void pool_barriers() {
  for (const int n : {2, 3, 8}) {
    set_thread_count(n);
    constexpr int kRounds = 2000;
    std::vector<int> value(static_cast<size_t>(n));
    std::atomic<int> wrong{0};
    run(0, [&](Team& team) {
      for (int i = 1; i <= kRounds; ++i) {
        value[static_cast<size_t>(team.rank())] = i;
        team.barrier();
        for (const int v : value) wrong += v != i;
        team.barrier();
      }
    });
    CHECK_EQ(wrong.load(), 0);
  }
}

void pool_exceptions() {
  for (const int n : {1, 2, 4}) {
    set_thread_count(n);
    for (int thrower = 0; thrower < n; ++thrower) {
      for (int i = 0; i < 10; ++i) {
        std::atomic<int> left{0};
        const std::string what = thrown<std::runtime_error>([&] {
          run(0, [&](Team& team) {
            struct Count {
              std::atomic<int>& n;
              ~Count() { ++n; }
            } count{left};
            team.barrier();
            if (team.rank() == thrower) throw std::runtime_error("from " + std::to_string(team.rank()));
            team.barrier();
            team.barrier();
          });
        });
        CHECK_EQ(what, "from " + std::to_string(thrower));
        CHECK_EQ(left.load(), n);  // nobody was still inside
        check_job(0);              // and the pool works on
      }
    }
    // All at once: one of them arrives.
    CHECK_EQ(thrown<std::logic_error>([] { run(0, [](Team&) { throw std::logic_error("each"); }); }), "each");
    CHECK_EQ(thrown<std::logic_error>([] { run(0, [](int) { throw std::logic_error("early"); }, [](Team&) {}); }),
             "early");
    check_job(0);
  }
}

void pool_nested() {
  set_thread_count(3);
  std::atomic<int> inner{0};
  run(0, [&](Team& team) {
    team.barrier();
    run(0, [&](Team& alone) {
      alone.barrier();
      inner += alone.size() == 1 && alone.rank() == 0;
    });
    team.barrier();
  });
  CHECK_EQ(inner.load(), 3);
}

void pool_callers() {
  set_thread_count(3);
  std::atomic<int> running{0}, overlaps{0};
  std::atomic<bool> stop{false};
  std::vector<std::string> errors(4);
  std::vector<std::thread> callers;
  for (size_t c = 0; c < errors.size(); ++c) {
    callers.emplace_back([&, c] {
      try {
        for (int i = 0; i < 200; ++i) {
          check_job(static_cast<int>(c));
          run(2, [&](Team& team) {
            if (team.rank() == 0) overlaps += running.fetch_add(1);
            team.barrier();
            if (team.rank() == 0) --running;
          });
        }
      } catch (const std::exception& e) {
        errors[c] = e.what();
      }
    });
  }
  std::thread changer([&] {  // resizing and looking meanwhile
    for (int i = 0; !stop; ++i) {
      set_thread_count(1 + i % 5);
      (void)thread_count();
      (void)system_info_json();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  for (auto& caller : callers) caller.join();
  stop = true;
  changer.join();
  for (const auto& error : errors) CHECK_EQ(error, "");
  CHECK_EQ(overlaps.load(), 0);
}

void pool_float_mode() {
#if defined(__SSE__)
  set_thread_count(3);
  const unsigned before = _mm_getcsr();
  const unsigned odd = 0x9FC0 | 0x2000;  // flush to zero, denormals are zero, round down
  _mm_setcsr(odd);
  std::vector<unsigned> seen(3);
  run(0, [&](Team& team) {
    seen[static_cast<size_t>(team.rank())] = _mm_getcsr();
    _mm_setcsr(0x3F80);  // must not outlive the job
  });
  const unsigned after = _mm_getcsr();
  std::vector<unsigned> again(3);
  run(0, [&](Team& team) { again[static_cast<size_t>(team.rank())] = _mm_getcsr(); });
  _mm_setcsr(before);
  CHECK_EQ(after, odd);
  CHECK_EQ(seen, (std::vector<unsigned>(3, 0x1F80)));
  CHECK_EQ(again, (std::vector<unsigned>(3, 0x1F80)));
#endif
}

void pool_signals() {
  set_thread_count(3);
  std::atomic<int> right{0};
  run(0, [&](Team& team) {
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    const bool worker = team.rank() != 0;
    right += (sigismember(&blocked, SIGINT) != 0) == worker && (sigismember(&blocked, SIGTERM) != 0) == worker &&
             sigismember(&blocked, SIGSEGV) == 0;
  });
  CHECK_EQ(right.load(), 3);
}

void pool_idles() {
  for (const int n : {2, 8}) {
    set_thread_count(n);
    check_job(0);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const auto cpu_seconds = [] {
      timespec t;
      clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
      return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
    };
    const double before = cpu_seconds();
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    const double used = cpu_seconds() - before;
    if (used > (SANITIZED ? 0.04 : 0.004))
      fail(__func__, __LINE__, "idle pool used " + text(used) + " s of CPU in 0.4 s");
  }
}

}  // namespace system_test
