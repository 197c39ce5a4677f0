/* Buffers that only grow, and work that the team shares. */
#include "base/check.h"
#include "kernels/cpu/internal.h"

/* Below this number of floats touched, waking workers costs more than they save. */
#define SERIAL_COST 32768

int cpu_room_grow(struct cpu_room *room, size_t bytes) {
    if (bytes <= room->bytes) return 0;
    void *mem = cpu_alloc(bytes);
    if (!mem) return ERR_NOMEM;
    cpu_free(room->mem);
    *room = (struct cpu_room){mem, bytes};
    return 0;
}

void cpu_room_must(struct cpu_room *room, size_t bytes) {
    int rc = cpu_room_grow(room, bytes);
    CHECK_MSG(rc == 0, "no memory for %zu bytes of step state", bytes);
}

int cpu_scratch_grow(struct cpu *cpu, size_t bytes) {
    int rc = 0;
    for (int i = 0; i < cpu->threads && !rc; i++) rc = cpu_room_grow(&cpu->scratch[i], bytes);
    return rc;
}

void cpu_run(struct cpu *cpu, int64_t cost, cpu_work *work, void *arg) {
    if (cost < SERIAL_COST)
        work(arg, 0);
    else
        cpu_team_run(cpu->team, work, arg);
}

struct item_job {
    struct cpu_tickets items;
    void (*one)(const void *job, int item);
    const void *job;
};

static void do_each(void *arg, int worker) {
    (void)worker;
    struct item_job *job = arg;
    int64_t end;
    for (int64_t item; (item = cpu_tickets_take(&job->items, 1, &end)) >= 0;)
        job->one(job->job, (int)item);
}

void cpu_run_items(struct cpu *cpu, int64_t cost, void (*one)(const void *job, int item),
                   const void *job, int items) {
    struct item_job all = {.one = one, .job = job};
    cpu_tickets_set(&all.items, items);
    cpu_run(cpu, cost, do_each, &all);
}
