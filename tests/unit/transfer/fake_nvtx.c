/* A fake NVTX library for tests: it counts the pushes and pops of each thread. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

enum { kThreads = 256, kNames = 64 };
struct Counts {
  long pushes, pops, depth, lowest;
};
static struct Counts counts[kThreads];
static atomic_int threads;
static _Thread_local struct Counts* mine;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char names[kNames][64];
static int name_count;

static struct Counts* here(void) {
  if (!mine) mine = &counts[atomic_fetch_add(&threads, 1) % kThreads];
  return mine;
}

int nvtxRangePushA(const char* name) {
  struct Counts* at = here();
  ++at->pushes;
  pthread_mutex_lock(&mutex);
  int found = 0;
  for (int i = 0; i < name_count; ++i) found |= strcmp(names[i], name) == 0;
  if (!found && name_count < kNames) strncpy(names[name_count++], name, sizeof names[0] - 1);
  pthread_mutex_unlock(&mutex);
  return (int)at->depth++;
}

int nvtxRangePop(void) {
  struct Counts* at = here();
  ++at->pops;
  if (--at->depth < at->lowest) at->lowest = at->depth;
  return (int)at->depth;
}

int fake_threads(void) { return atomic_load(&threads); }
long fake_count(int thread, int what) {
  const struct Counts* at = &counts[thread];
  return what == 0 ? at->pushes : what == 1 ? at->pops : what == 2 ? at->depth : at->lowest;
}
int fake_names(void) { return name_count; }
const char* fake_name(int i) { return names[i]; }
