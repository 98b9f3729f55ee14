/* A GPU driver library for tests: libcuda, or with -DHIP libamdhip64, on host memory.

   What is enqueued runs as late as the API allows, at the next wait, and a graph's nodes run in the
   latest order that its edges allow: a missing edge, a buffer that is reused too early or a wait
   that is missing gives wrong results. A module's image is the path of a shared object; a kernel is
   a C function `void f(void **parameters, const unsigned *shape)` in it, shape being grid x, y, z,
   threads, shared bytes, and `f_parameters` a string with a p (pointer) or i (int) for each
   parameter. Every call is counted, and can be told to fail. */
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef HIP
#define N(cuda, hip) hip
#else
#define N(cuda, hip) cuda
#endif
typedef unsigned long long Ptr;
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_CONTEXT = 201, BAD_HANDLE = 400, NOT_FOUND = 500 };
enum { MAX = 8192, PARAMETERS = 40 };

typedef struct { void *code; const char *kinds; char name[64]; int shared_allowed; } Function;
typedef struct { void *library; Function functions[64]; int count; } Module;
typedef struct { Ptr to, from; size_t nbytes; } Copy;
typedef struct {
  Function *function; /* a launch */
  uint64_t values[PARAMETERS];
  unsigned shape[5];
  Copy copy; /* or a copy, where nbytes > 0 */
  int before[64], early[64], edges; /* nodes that it waits for */
  void *graph;
} Node;
typedef struct { Node *nodes[MAX]; int count; } Graph;
typedef struct { char kind; Node node; Graph *graph; Ptr event; int value; char data[1]; } Op;
typedef struct { Op *ops[MAX]; long first, last; } Stream;
typedef struct { Stream *stream; long place; } Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { char *at; size_t nbytes; int device; } blocks[MAX];
static struct { char name[48]; long calls, fail_at; int code; } counts[128];
static int n_counts, major_ = 9, minor_ = 0, version_ = N(13000, 70125424), devices = 2, retained = -1;
static size_t total_bytes = 1ull << 32, used_bytes;
static char arch_[64] = "gfx950:sramecc+:xnack-";
static __thread int current = -1;
int stub_current_device;
long stub_launched[8]; /* launches by stream: 0 is the default stream */
char stub_order[1 << 16]; /* names of kernels as they ran */
int stub_early_edges, stub_broken;

static int enter(const char *name, int needs_context) {
  int i = 0, code = OK;
  pthread_mutex_lock(&lock);
  while (i < n_counts && strcmp(counts[i].name, name)) i++;
  if (i == n_counts) snprintf(counts[n_counts++].name, 48, "%s", name);
  counts[i].calls++;
  if (counts[i].fail_at && counts[i].calls == counts[i].fail_at) code = counts[i].code;
  else if (stub_broken && needs_context) code = stub_broken;
  else if (needs_context && current < 0) code = NO_CONTEXT;
  pthread_mutex_unlock(&lock);
  return code;
}
#define ENTER(context) { int code_ = enter(__func__, context); if (code_) return code_; }

void stub_fail(const char *name, int after, int code) { /* fail the call number `after` from now */
  enter(name, 0);
  for (int i = 0; i < n_counts; i++)
    if (!strcmp(counts[i].name, name)) counts[i].calls--, counts[i].fail_at = counts[i].calls + after, counts[i].code = code;
}
long stub_calls(const char *name) {
  for (int i = 0; i < n_counts; i++) if (!strcmp(counts[i].name, name)) return counts[i].calls;
  return 0;
}
void stub_reset(void) {
  n_counts = 0, major_ = 9, minor_ = 0, version_ = N(13000, 70125424), devices = 2, total_bytes = 1ull << 32;
  stub_broken = stub_early_edges = 0, stub_order[0] = 0;
  memset(stub_launched, 0, sizeof stub_launched), memset(counts, 0, sizeof counts);
  snprintf(arch_, sizeof arch_, "gfx950:sramecc+:xnack-");
}
void stub_device(int major, int minor, int version, size_t total, const char *arch) {
  major_ = major, minor_ = minor, version_ = version, total_bytes = total;
  if (arch) snprintf(arch_, sizeof arch_, "%s", arch);
}
size_t stub_used_bytes(void) { return used_bytes; }

static int block_of(Ptr at, size_t nbytes) { /* the allocation that holds these bytes, or -1 */
  for (int i = 0; i < MAX; i++)
    if (blocks[i].at && (char *)at >= blocks[i].at && (char *)at + nbytes <= blocks[i].at + blocks[i].nbytes) return i;
  return -1;
}
static int take(Ptr *made, size_t nbytes, int device) {
  int code = OK, i = 0;
  pthread_mutex_lock(&lock);
  while (i < MAX && blocks[i].at) i++;
  if (i == MAX || nbytes == 0) code = INVALID;
  else if (device && used_bytes + nbytes > total_bytes) code = NO_MEMORY;
  else {
    blocks[i].at = aligned_alloc(256, (nbytes + 255) / 256 * 256);
    memset(blocks[i].at, 0xA5, nbytes); /* what nobody wrote is not zero */
    blocks[i].nbytes = nbytes, blocks[i].device = device, *made = (Ptr)blocks[i].at;
    if (device) used_bytes += nbytes;
  }
  pthread_mutex_unlock(&lock);
  return code;
}
static int give(Ptr at, int device) {
  int code = INVALID;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MAX; i++)
    if (blocks[i].at == (char *)at && at && blocks[i].device == device) {
      if (device) used_bytes -= blocks[i].nbytes;
      free(blocks[i].at), blocks[i].at = NULL, code = OK;
      break;
    }
  pthread_mutex_unlock(&lock);
  return code;
}

static void run_node(Node *n) {
  void *parameters[PARAMETERS];
  if (n->function) {
    for (int i = 0; i < PARAMETERS; i++) parameters[i] = &n->values[i];
    ((void (*)(void **, const unsigned *))n->function->code)(parameters, n->shape);
    if (strlen(stub_order) + 66 < sizeof stub_order) strcat(strcat(stub_order, n->function->name), " ");
  } else if (n->copy.nbytes) memmove((void *)n->copy.to, (void *)n->copy.from, n->copy.nbytes);
}
static void run_graph(Graph *g) { /* of the nodes that may run, the one that was added last */
  static char done[MAX];
  memset(done, 0, sizeof done);
  for (int left = g->count; left; left--)
    for (int i = g->count - 1; i >= 0; i--) {
      int ready = !done[i];
      for (int e = 0; ready && e < g->nodes[i]->edges; e++) ready = done[g->nodes[i]->before[e]];
      if (ready) { run_node(g->nodes[i]), done[i] = 1; break; }
    }
}
static void run_until(Stream *s, long place) {
  for (; s->first < place; s->first++) {
    Op *op = s->ops[s->first % MAX];
    if (op->kind == 'n') run_node(&op->node);
    if (op->kind == 'g') run_graph(op->graph);
    if (op->kind == 's') memset((void *)op->node.copy.to, op->value, op->node.copy.nbytes);
    free(op);
  }
}
static int put(Stream *s, char kind, Copy copy, Graph *graph, int value) {
  Op *op = calloc(1, sizeof *op);
  if (!s || s->last - s->first >= MAX - 1) return BAD_HANDLE;
  op->kind = kind, op->node.copy = copy, op->graph = graph, op->value = value;
  s->ops[s->last++ % MAX] = op;
  return OK;
}

int N(cuInit, hipInit)(unsigned flags) { ENTER(0) return flags ? INVALID : OK; }
int N(cuDriverGetVersion, hipDriverGetVersion)(int *v) { ENTER(0) *v = version_; return OK; }
int N(cuDeviceGetCount, hipGetDeviceCount)(int *n) { ENTER(0) *n = devices; return OK; }
int N(cuDeviceGet, hipDeviceGet)(int *d, int i) { ENTER(0) *d = i; return i < devices ? OK : 101; }
int N(cuDeviceGetName, hipDeviceGetName)(char *s, int n, int d) { ENTER(0) snprintf(s, n, "Stub %d", d); return OK; }
static int text(int code, const char **found) {
  static const char *names[] = {"SUCCESS", "ERROR_INVALID_VALUE", "ERROR_OUT_OF_MEMORY"};
  *found = code >= 0 && code < 3 ? names[code] : code == 700 ? "ERROR_ILLEGAL_ADDRESS" : NULL;
  return *found ? OK : INVALID;
}
int N(cuGetErrorName, hipDrvGetErrorName)(int code, const char **s) { return text(code, s); }
int N(cuGetErrorString, hipDrvGetErrorString)(int code, const char **s) { return text(code, s); }
#ifdef HIP
int hipGetDevicePropertiesR0600(char *p, int d) { ENTER(0) memset(p, 0, 1472); strcpy(p + 1160, arch_); return OK; }
int hipSetDevice(int d) { ENTER(0) stub_current_device = current = d; return d < devices ? OK : 101; }
#else
int cuDeviceGetAttribute(int *v, int attribute, int d) { ENTER(0) *v = attribute == 75 ? major_ : attribute == 76 ? minor_ : 0; return OK; }
int cuDevicePrimaryCtxRetain(Ptr *c, int d) { ENTER(0) *c = 1000 + d, retained = d; return OK; }
int cuDevicePrimaryCtxRelease_v2(int d) { ENTER(0) return d == retained ? OK : INVALID; }
int cuCtxSetCurrent(Ptr c) { ENTER(0) stub_current_device = current = (int)c - 1000; return c ? OK : NO_CONTEXT; }
#endif
int N(cuMemGetInfo_v2, hipMemGetInfo)(size_t *f, size_t *t) { ENTER(1) *f = total_bytes - used_bytes, *t = total_bytes; return OK; }
int N(cuMemAlloc_v2, hipMalloc)(Ptr *p, size_t n) { ENTER(1) return take(p, n, 1); }
int N(cuMemFree_v2, hipFree)(Ptr p) { ENTER(1) return give(p, 1); }
int N(cuMemHostAlloc, hipHostMalloc)(Ptr *p, size_t n, unsigned f) { ENTER(1) return take(p, n, 0); }
int N(cuMemFreeHost, hipHostFree)(Ptr p) { ENTER(1) return give(p, 0); }
int N(cuMemHostRegister_v2, hipHostRegister)(void *p, size_t n, unsigned f) { ENTER(1) return p && n ? OK : INVALID; }
int N(cuMemHostUnregister, hipHostUnregister)(void *p) { ENTER(1) return p ? OK : INVALID; }
int N(cuMemsetD8Async, hipMemsetD8Async)(Ptr to, unsigned char v, size_t n, Stream *s) {
  ENTER(1) return block_of(to, n) < 0 ? 700 : put(s, 's', (Copy){to, 0, n}, NULL, v);
}
int N(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync)(Ptr to, Ptr from, size_t n, Stream *s) {
  ENTER(1) int block = block_of(to, n);
  if (block < 0 || !blocks[block].device) return 700;
  if (block_of(from, n) >= 0) return put(s, 'n', (Copy){to, from, n}, NULL, 0);
  run_until(s, s->last); /* pageable memory: copied before the call returns */
  memcpy((void *)to, (void *)from, n);
  return OK;
}
int N(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync)(Ptr to, Ptr from, size_t n, Stream *s) {
  ENTER(1) int block = block_of(from, n);
  return block < 0 || !blocks[block].device ? 700 : put(s, 'n', (Copy){to, from, n}, NULL, 0);
}
int N(cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync)(Ptr to, Ptr from, size_t n, Stream *s) {
  ENTER(1) return block_of(to, n) < 0 || block_of(from, n) < 0 ? 700 : put(s, 'n', (Copy){to, from, n}, NULL, 0);
}
int N(cuStreamCreate, hipStreamCreateWithFlags)(Stream **s, unsigned f) { ENTER(1) *s = calloc(1, sizeof **s); return OK; }
int N(cuStreamSynchronize, hipStreamSynchronize)(Stream *s) { ENTER(1) run_until(s, s->last); return OK; }
int N(cuStreamDestroy_v2, hipStreamDestroy)(Stream *s) { ENTER(1) run_until(s, s->last); free(s); return OK; }
int N(cuEventCreate, hipEventCreateWithFlags)(Event **e, unsigned f) { ENTER(1) *e = calloc(1, sizeof **e); return OK; }
int N(cuEventRecord, hipEventRecord)(Event *e, Stream *s) { ENTER(1) e->stream = s, e->place = s->last; return OK; }
int N(cuEventSynchronize, hipEventSynchronize)(Event *e) { ENTER(1) if (e->stream) run_until(e->stream, e->place); return OK; }
int N(cuEventElapsedTime, hipEventElapsedTime)(float *ms, Event *a, Event *b) { ENTER(1) *ms = 1; return a && b ? OK : BAD_HANDLE; }
int N(cuEventDestroy_v2, hipEventDestroy)(Event *e) { ENTER(1) free(e); return OK; }

int N(cuModuleLoadData, hipModuleLoadData)(Module **m, const char *image) {
  ENTER(1) Module *made = calloc(1, sizeof *made);
  made->library = dlopen(image, RTLD_NOW | RTLD_LOCAL), *m = made;
  return made->library ? OK : 200;
}
int N(cuModuleUnload, hipModuleUnload)(Module *m) { ENTER(1) free(m); return OK; }
int N(cuModuleGetFunction, hipModuleGetFunction)(Function **f, Module *m, const char *name) {
  ENTER(1) Function *made = &m->functions[m->count++];
  char kinds[96];
  snprintf(kinds, sizeof kinds, "%s_parameters", name), snprintf(made->name, 64, "%s", name);
  made->code = dlsym(m->library, name), made->kinds = dlsym(m->library, kinds), *f = made;
  return made->code ? OK : NOT_FOUND;
}
static int fill(Node *n, Function *f, const unsigned *shape, void **parameters) {
  if (!f || !f->code || !parameters) return BAD_HANDLE;
  for (int i = 0; i < 4; i++) if (!shape[i]) return INVALID;
  if (shape[1] > 65535 || shape[2] > 65535 || shape[3] > 1024) return INVALID;
#ifndef HIP
  if (shape[4] > 49152 && f->shared_allowed < (int)shape[4]) return INVALID;
#endif
  n->function = f, memcpy(n->shape, shape, sizeof n->shape);
  for (int i = 0; f->kinds && f->kinds[i]; i++) {
    /* the address of an int need not be that of eight readable bytes */
    memcpy(&n->values[i], parameters[i], f->kinds[i] == 'p' ? 8 : 4);
  }
  return OK;
}
int N(cuLaunchKernel, hipModuleLaunchKernel)(Function *f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared, Stream *s, void **parameters, void **extra) {
  ENTER(1) unsigned shape[5] = {x, y, z, bx, shared};
  if (!s || extra || by != 1 || bz != 1) return BAD_HANDLE;
  int code = put(s, 'n', (Copy){0, 0, 0}, NULL, 0);
  stub_launched[1]++;
  return code ? code : fill(&s->ops[(s->last - 1) % MAX]->node, f, shape, parameters);
}
int N(cuGraphCreate, hipGraphCreate)(Graph **g, unsigned f) { ENTER(1) *g = calloc(1, sizeof **g); return OK; }
static int index_of(Graph *g, Node *n) { for (int i = 0; i < g->count; i++) if (g->nodes[i] == n) return i; return -1; }
static int edge(Graph *g, Node *before, Node *after, int early) {
  int i = index_of(g, before), j = index_of(g, after);
  if (i < 0 || j < 0 || after->edges == 64) return BAD_HANDLE;
  if (early && (!before->function || !after->function)) return INVALID;
  after->early[after->edges] = early, after->before[after->edges++] = i, stub_early_edges += early;
  return OK;
}
static int add(Node **made, Graph *g, Node **before, size_t n) {
  if (!g || g->count == MAX) return BAD_HANDLE;
  Node *node = g->nodes[g->count++] = *made = calloc(1, sizeof *node);
  for (size_t i = 0; i < n; i++) { int code = edge(g, before[i], node, 0); if (code) return code; }
  return OK;
}
#ifdef HIP
typedef struct { unsigned block[3]; void **extra; Function *f; unsigned grid[3]; void **parameters; unsigned shared; } KernelParams;
int hipGraphAddMemcpyNode1D(Node **made, Graph *g, Node **before, size_t n, Ptr to, Ptr from, size_t nbytes, int kind) {
  ENTER(1) int code = add(made, g, before, n);
  if (!code) (*made)->copy = (Copy){to, from, nbytes};
  return kind != 3 ? INVALID : code;
}
int hipGraphInstantiateWithFlags(Graph **made, Graph *g, unsigned long long flags) {
  ENTER(1)
#else
typedef struct { Function *f; unsigned grid[3], block[3], shared; void **parameters, **extra; void *kernel, *context; } KernelParams;
typedef struct { size_t x, y, z, level; unsigned type; void *host; Ptr device; void *array, *reserved; size_t pitch, height; } End;
typedef struct { End from, to; size_t width, height, depth; } CopyParams;
typedef struct { unsigned char from_port, to_port, type, reserved[5]; } EdgeData;
typedef struct { uint64_t flags; void *stream; Node *error; unsigned result; } Instantiate;
int cuFuncGetParamInfo(Function *f, size_t i, size_t *offset, size_t *size) {
  ENTER(1) if (!f->kinds || i >= strlen(f->kinds)) return INVALID;
  *size = f->kinds[i] == 'p' ? 8 : 4, *offset = 0;
  return OK;
}
int cuFuncSetAttribute(Function *f, int attribute, int value) {
  ENTER(1) if (attribute != 8 || value > 232448) return INVALID;
  f->shared_allowed = value;
  return OK;
}
int cuGraphAddMemcpyNode(Node **made, Graph *g, Node **before, size_t n, CopyParams *p, Ptr context) {
  ENTER(1) int code = add(made, g, before, n);
  if (p->from.type != 2 || p->to.type != 2 || p->height != 1 || p->depth != 1 || !context) return INVALID;
  if (!code) (*made)->copy = (Copy){p->to.device, p->from.device, p->width};
  return code;
}
int cuGraphAddDependencies_v2(Graph *g, Node **from, Node **to, EdgeData *data, size_t n) {
  ENTER(1) if (n != 1 || data->to_port || data->from_port != data->type) return INVALID;
  return edge(g, *from, *to, data->type);
}
int cuGraphInstantiateWithParams(Graph **made, Graph *g, Instantiate *p) {
  int code_ = enter(__func__, 1);
  if (code_) { p->result = 1, p->error = g->count ? g->nodes[g->count - 1] : NULL; return code_; }
#endif
  *made = malloc(sizeof *g), memcpy(*made, g, sizeof *g);
  return OK;
}
int N(cuGraphAddKernelNode_v2, hipGraphAddKernelNode)(Node **made, Graph *g, Node **before, size_t n, KernelParams *p) {
  ENTER(1) int code = add(made, g, before, n);
  unsigned shape[5] = {p->grid[0], p->grid[1], p->grid[2], p->block[0], p->shared};
  return code ? code : fill(*made, p->f, shape, p->parameters);
}
int N(cuGraphAddEmptyNode, hipGraphAddEmptyNode)(Node **made, Graph *g, Node **before, size_t n) { ENTER(1) return add(made, g, before, n); }
int N(cuGraphGetNodes, hipGraphGetNodes)(Graph *g, Node **nodes, size_t *n) { ENTER(1) *n = g->count; return OK; }
int N(cuGraphUpload, hipGraphUpload)(Graph *g, Stream *s) { ENTER(1) return s ? OK : BAD_HANDLE; }
int N(cuGraphLaunch, hipGraphLaunch)(Graph *g, Stream *s) { ENTER(1) stub_launched[2]++; return put(s, 'g', (Copy){0, 0, 0}, g, 0); }
int N(cuGraphDestroy, hipGraphDestroy)(Graph *g) { ENTER(1) free(g); return OK; }
int N(cuGraphExecDestroy, hipGraphExecDestroy)(Graph *g) { ENTER(1) free(g); return OK; }
