/* Declarations shared by the files of the store: store.c (the stores and their thread),
 * store_scan.c (the files that there are) and store_move.c (those that come and leave). No other
 * file includes this. */
#ifndef KEEPD_ENGINE_DISK_STORE_INT_H
#define KEEPD_ENGINE_DISK_STORE_INT_H

#include <pthread.h>
#include <time.h>

#include "engine/disk/state_dir.h"
#include "engine/disk/store.h"
#include "engine/disk/store_index.h"

enum { REMOVES_MAX = 64, TOUCHES_MAX = 64 };

enum write_state { WRITE_FREE, WRITE_READY, WRITE_RUNNING, WRITE_DONE };
enum read_state { READ_FREE, READ_WANTED, READ_RUNNING, READ_DONE };

/* A file that is to be deleted. */
struct store_removal {
    uint64_t id;
    bool replaced;  /* by a newer turn: the file stays if another daemon has used it since own_ns */
    int64_t own_ns; /* time stamp when this daemon used the file; 0: never */
};

/* A file that came from another machine and is whole: it gets its name. */
struct store_adoption {
    struct store_adoption *next;
    uint64_t number; /* number in the temporary name */
    const struct state_head *head;
    bool done;
    struct fault fault; /* code 0: the file has its name */
};

/* The state that the stores of one directory share. */
struct directory {
    struct store_options options; /* without done and arg, which each store has */
    struct state_dir dir;
    pthread_t thread;
    bool started;
    pthread_mutex_t lock; /* guards all below, and `write` and `read` of the stores */
    pthread_cond_t work, settled;
    bool stop;
    struct store_index index;
    struct store_stats stats; /* without files and bytes, which the index counts */
    struct store_removal removes[REMOVES_MAX];
    int remove_count;
    uint64_t touches[TOUCHES_MAX]; /* ids of files whose time of last use is to be set */
    int touch_count;
    struct store_adoption *adoptions; /* waiting; at most one for each upload */
    int64_t uploading;                /* bytes that came of all uploads that have not ended */
    struct store *stores[STORES_MAX];
    int store_count;
    int turn;                    /* index of the store that is asked first */
    const struct store *serving; /* the store that the thread works for */
    bool waking;                 /* the thread is calling the `done` of every store */
    bool shared;                 /* other daemons use the directory */
    bool list_wanted;            /* somebody waits for a listing */
    int64_t listed_ns;           /* clock_ns when the last listing began */
    uint64_t listing;            /* number of the last listing */
    int64_t unfinished;          /* bytes that other daemons were writing then */
    /* The directory's thread only. */
    int64_t renewed_ns;   /* clock_ns of the last renewal of the lease */
    int64_t listed_at_ns; /* state_dir_changed_ns at the last listing; 0: list again in any case */
};

struct store {
    struct directory *directory;
    int index; /* number of the store, see store_join */
    void (*done)(void *arg);
    void *arg;
    struct {
        enum write_state state;
        struct state_head head;
        char *data;
        size_t size;
        int rc;
        bool removed; /* removed while it was written */
    } write;
    struct {
        enum read_state state;
        uint64_t id;
        char *data;
        struct state_view view;
        int rc;
        bool removed;  /* removed while it was read */
        bool unwanted; /* unloaded while it was read: freed at the end */
    } read;
};

/* Gives a file that was uploaded its name, on the directory's thread. Waits. */
void store_adopt(struct directory *d, struct store_adoption *adoption);

/* ---- store_scan.c (the lock is not held, unless stated otherwise) ---- */

/* Builds the index at the start. Errors as of state_dir_list, ERR_NOMEM, and ERR_LIMIT: too many
 * files. */
int store_scan(struct directory *d, struct fault *fault);
/* Brings the index up to date with what other daemons wrote and deleted, and the directory within
 * its bytes. */
void store_refresh(struct directory *d);
/* Deletes files (store_index_first_to_go) until `count` more of `size` bytes fit. ERR_LIMIT: so
 * many bytes never fit. */
int store_make_space(struct directory *d, int count, int64_t size);
/* Adds a file to the index, in place of an earlier one with its id, whose owner keeps it unless the
 * new one has an owner. The lock is held. */
int store_note_file(struct directory *d, const struct store_file *file);
/* Drops the index entry of an earlier file that was put aside under this id: the new file has
 * replaced it. The lock is held. */
void store_forget_bad(struct directory *d, uint64_t id);

/* Deletes the files whose time to live has ended, counted from their last use by the file system's
 * clock. */
void store_expire(struct directory *d);

/* Renews the daemon's lease, and asks for a listing while there are other daemons. So whoever is
 * idle deletes what dead daemons left. */
void store_renew(struct directory *d);
bool store_renew_due(const struct directory *d);
struct timespec store_renewal(const struct directory *d); /* CLOCK_MONOTONIC */
bool store_is_shared(struct directory *d);

#endif
