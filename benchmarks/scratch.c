/* Counts what a whole process takes from the C library, for benchmarks/scratch.py: preloaded, glibc on Linux.
 *
 * Blocks below 4 KiB are left out: they are Python's objects, and no tensor of weight. Memory that a library maps
 * for itself counts too. What is made executable is counted apart: oneDNN reserves 256 KiB and more for a kernel
 * and fills a few of its pages. Compile with: cc -shared -fPIC -O2 -o scratch.so scratch.c
 */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

enum { SMALLEST = 4096, MAPPINGS = 4096 };

static long live, peak, code;
static struct { void *start; size_t nbytes; } mappings[MAPPINGS], kernels[MAPPINGS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

long scratch_live(void) { return __atomic_load_n(&live, __ATOMIC_RELAXED); }
long scratch_peak(void) { return __atomic_load_n(&peak, __ATOMIC_RELAXED); }
long scratch_code(void) { return __atomic_load_n(&code, __ATOMIC_RELAXED); }
void scratch_reset(void) { __atomic_store_n(&peak, scratch_live(), __ATOMIC_RELAXED); }

static void add(long nbytes)
{
    long now = __atomic_add_fetch(&live, nbytes, __ATOMIC_RELAXED), most = scratch_peak();
    while (now > most && !__atomic_compare_exchange_n(&peak, &most, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

static void *came(void *block)
{
    size_t nbytes = block ? malloc_usable_size(block) : 0;
    if (nbytes >= SMALLEST) add((long)nbytes);
    return block;
}

static void goes(void *block)
{
    size_t nbytes = block ? malloc_usable_size(block) : 0;
    if (nbytes >= SMALLEST) add(-(long)nbytes);
}

void *malloc(size_t nbytes) { return came(__libc_malloc(nbytes)); }
void *calloc(size_t count, size_t nbytes) { return came(__libc_calloc(count, nbytes)); }
void *memalign(size_t alignment, size_t nbytes) { return came(__libc_memalign(alignment, nbytes)); }
void *aligned_alloc(size_t alignment, size_t nbytes) { return memalign(alignment, nbytes); }
void free(void *block) { goes(block); __libc_free(block); }

void *realloc(void *block, size_t nbytes)
{
    size_t before = block ? malloc_usable_size(block) : 0;
    void *moved = __libc_realloc(block, nbytes);
    if ((moved || nbytes == 0) && before >= SMALLEST) add(-(long)before);
    return came(moved);
}

int posix_memalign(void **block, size_t alignment, size_t nbytes)
{
    void *found = memalign(alignment, nbytes);
    if (!found) return ENOMEM;
    *block = found;
    return 0;
}

int mprotect(void *address, size_t nbytes, int protection)
{
    pthread_mutex_lock(&lock);
    int i = 0, free_place = -1;
    for (; i < MAPPINGS && kernels[i].start != address; i++)
        if (!kernels[i].start && free_place < 0) free_place = i;
    if (i == MAPPINGS && (protection & PROT_EXEC) && free_place >= 0) {
        kernels[free_place].start = address;
        kernels[free_place].nbytes = nbytes;
        __atomic_add_fetch(&code, (long)nbytes, __ATOMIC_RELAXED);
        add(-(long)nbytes);
    } else if (i < MAPPINGS && !(protection & PROT_EXEC)) {
        kernels[i].start = NULL;
        __atomic_add_fetch(&code, -(long)kernels[i].nbytes, __ATOMIC_RELAXED);
        add((long)kernels[i].nbytes);
    }
    pthread_mutex_unlock(&lock);
    return (int)syscall(SYS_mprotect, address, nbytes, protection);
}

static void note(void *start, size_t nbytes)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAPPINGS; i++)
        if (!mappings[i].start) { mappings[i].start = start; mappings[i].nbytes = nbytes; add((long)nbytes); break; }
    pthread_mutex_unlock(&lock);
}

void *mmap(void *address, size_t nbytes, int protection, int flags, int file, off_t offset)
{
    void *start = (void *)syscall(SYS_mmap, address, nbytes, protection, flags, file, offset);
    if (start != MAP_FAILED && (flags & MAP_ANONYMOUS) && (protection & PROT_WRITE)) note(start, nbytes);
    return start;
}

int munmap(void *address, size_t nbytes)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAPPINGS; i++)
        if (mappings[i].start && mappings[i].start == address) {
            mappings[i].start = NULL;
            add(-(long)mappings[i].nbytes);
            break;
        }
    pthread_mutex_unlock(&lock);
    return (int)syscall(SYS_munmap, address, nbytes);
}
