#include "engine/steps/mask_thread.h"

#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/mem.h"

int mask_thread_open(struct mask_thread *thread) {
    *thread = (struct mask_thread){0};
    if (pthread_mutex_init(&thread->lock, NULL) != 0) return ERR_NOMEM;
    if (pthread_cond_init(&thread->work, NULL) == 0) return 0;
    pthread_mutex_destroy(&thread->lock);
    return ERR_NOMEM;
}

/* ---- Tasks ---- */

static void free_task(struct mask_task *task) {
    if (task->release) task->release(task->release_arg);
    mem_free(task->mask);
    mem_free(task->text);
    mem_free(task);
}

struct mask_task *mask_task_open(const struct constrain_at *at, const char *text, size_t size,
                                 size_t mask_words) {
    struct mask_task *task = mem_try_alloc(1, sizeof *task);
    if (task == NULL) return NULL;
    *task = (struct mask_task){.at = *at, .size = size, .slice = MASK_SLICE_WORK};
    task->text = mem_try_alloc(size + 1, 1);
    if (mask_words > 0) task->mask = mem_try_alloc(mask_words, sizeof *task->mask);
    if (task->text == NULL || (mask_words > 0 && task->mask == NULL)) {
        free_task(task);
        return NULL;
    }
    if (size > 0) memcpy(task->text, text, size);
    return task;
}

void mask_task_drop(struct mask_thread *thread, struct mask_task *task) {
    pthread_mutex_lock(&thread->lock);
    bool done = mask_task_done(task);
    task->dropped = true;
    pthread_mutex_unlock(&thread->lock);
    if (done) free_task(task);
}

/* ---- The thread ---- */

/* add_last and its counterpart are called with the lock held. */
static void add_last(struct mask_thread *thread, struct mask_task *task) {
    task->next_task = NULL;
    if (thread->first == NULL)
        thread->first = task;
    else
        thread->last->next_task = task;
    thread->last = task;
}

static struct mask_task *pop_task(struct mask_thread *thread) {
    struct mask_task *task = thread->first;
    if (task != NULL) thread->first = task->next_task;
    return task;
}

/* Runs a slice of a task. Called with the lock held; the lock is released meanwhile. */
static void run_slice(struct mask_thread *thread, struct mask_task *task) {
    struct mask_wake wake = {0};
    if (!task->dropped) {
        pthread_mutex_unlock(&thread->lock);
        struct constrain_effort effort = {task->slice, true};
        task->rc = constrain_next_within(task->language, &task->at, task->text, task->size,
                                         task->mask, &task->next, &effort);
        task->slice *= 2;
        pthread_mutex_lock(&thread->lock);
    }
    bool dropped = task->dropped;
    if (!dropped && task->rc == ERR_BUSY) {
        add_last(thread, task);
        return;
    }
    if (!dropped) {
        wake = task->wake;
        atomic_store_explicit(&task->done, true, memory_order_release);
    }
    pthread_mutex_unlock(&thread->lock);
    if (dropped) free_task(task);
    if (wake.call) wake.call(wake.arg);
    pthread_mutex_lock(&thread->lock);
}

static void *mask_thread_main(void *arg) {
    struct mask_thread *thread = arg;
    /* Where it is not permitted, the thread works at the usual priority. */
    (void)setpriority(PRIO_PROCESS, (id_t)gettid(), MASK_NICE);
    pthread_mutex_lock(&thread->lock);
    while (!thread->stopping) {
        struct mask_task *task = pop_task(thread);
        if (task != NULL)
            run_slice(thread, task);
        else
            pthread_cond_wait(&thread->work, &thread->lock);
    }
    pthread_mutex_unlock(&thread->lock);
    return NULL;
}

int mask_thread_post(struct mask_thread *thread, struct mask_task *task) {
    pthread_mutex_lock(&thread->lock);
    if (!thread->started && !thread->stopping)
        thread->started = pthread_create(&thread->thread, NULL, mask_thread_main, thread) == 0;
    bool started = thread->started;
    if (started) {
        add_last(thread, task);
        pthread_cond_signal(&thread->work);
    } else {
        atomic_store(&task->done, true);
    }
    pthread_mutex_unlock(&thread->lock);
    return started ? 0 : ERR_NOMEM;
}

void mask_thread_stop(struct mask_thread *thread) {
    pthread_mutex_lock(&thread->lock);
    bool started = thread->started;
    thread->stopping = true;
    thread->started = false;
    pthread_cond_signal(&thread->work);
    pthread_mutex_unlock(&thread->lock);
    if (started) pthread_join(thread->thread, NULL);
}

void mask_thread_close(struct mask_thread *thread) {
    struct mask_task *task;
    mask_thread_stop(thread);
    while ((task = pop_task(thread)) != NULL) free_task(task);
    pthread_cond_destroy(&thread->work);
    pthread_mutex_destroy(&thread->lock);
}
