/* The adapters of an engine: names, limits, and which of them are in use. Each is placed in the
 * model of every replica, by the replica's own thread between two steps, under one number.
 *
 *   FREE -> PLACING   a caller of adapters_load has read the files; replicas place the numbers
 *        -> SERVED    all have: requests find it by its name
 *        -> LEAVING   no request finds it; when the last one that has it has ended, replicas remove
 *                     it, and its number and its bytes are free
 *
 * Thread: any; the table has a lock, and the numbers of an adapter that is being placed do not
 * change. */
#ifndef KEEPD_ENGINE_ADAPTERS_H
#define KEEPD_ENGINE_ADAPTERS_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine/engine.h"
#include "model/adapter.h"

_Static_assert(ENGINE_REPLICAS_MAX <= 64, "a replica is a bit of a word");

enum adapter_state { ADAPTER_FREE, ADAPTER_PLACING, ADAPTER_SERVED, ADAPTER_LEAVING };

struct adapter_slot {
    enum adapter_state state;
    char name[ENGINE_ADAPTER_NAME];
    struct adapter *numbers; /* while it is placed */
    uint64_t asked, placed;  /* replicas that have tried to place it, and that have it */
    struct fault fault;      /* the first of them */
    int users, rank;
    int64_t bytes;
    uint64_t requests;
    uint8_t digest[SHA256_BYTES];
};

struct adapter_table {
    pthread_mutex_t reading; /* held while files are read, one adapter's at a time: it may take the
                                memory that others leave. Taken before `lock` */
    pthread_mutex_t lock;    /* for all below */
    pthread_cond_t tried;    /* a replica has tried to place an adapter */
    struct adapter_slot slots[MODEL_ADAPTERS_MAX]; /* number - 1 */
    int most;                                      /* 0: there are none */
    int64_t bytes, bytes_most;                     /* memory of all that are not free */
    atomic_uint changes;                           /* read without the lock */
};

void adapters_open(struct adapter_table *table, int most, int64_t bytes_most);
void adapters_close(struct adapter_table *table);
/* Splits "NAME=PATH". ERR_INVALID. */
int adapters_split(const char *text, char name[ENGINE_ADAPTER_NAME], const char **path,
                   struct fault *fault);
/* Reads an adapter and gives it a number, from which adapters_attend places it. *out: the number.
 * Waits while another one is read, so that all together take no more memory than bytes_most.
 * ERR_LIMIT, ERR_INVALID (the name is taken), and those of adapter_read. */
int adapters_read(struct adapter_table *table, const struct model_config *config, const char *name,
                  const char *path, int *out, struct fault *fault);
/* Waits until all `replicas` have tried to place it. A failure leaves nothing behind. */
int adapters_wait(struct adapter_table *table, int number, int replicas, struct fault *fault);
/* Places and removes what the replica has to; called by its thread between two steps. */
void adapters_attend(struct adapter_table *table, int replica, struct model *model);
bool adapters_find(struct adapter_table *table, const char *name, struct engine_adapter *out);
/* Ends one use. true: an adapter that leaves had no other one, so replicas have to be woken. */
bool adapters_leave(struct adapter_table *table, int number);
bool adapters_remove(struct adapter_table *table, const char *name); /* false: there is none */
int adapters_list(struct adapter_table *table, struct engine_adapter_row *rows, int max);

#endif
