#include "engine/steps/loops.h"

#include "base/err.h"
#include "base/mem.h"

int loops_open(struct loops *loops, const struct engine_loops *rule, int32_t room) {
    *loops = (struct loops){0};
    if (rule->count < 2 || room < rule->count) return 0;
    const int32_t most = room / rule->count; /* a longer block cannot stand there so often */
    loops->sizes = rule->longest < most ? rule->longest : most;
    loops->runs = mem_try_alloc((size_t)loops->sizes + 1, sizeof *loops->runs);
    return loops->runs ? 0 : ERR_NOMEM;
}

void loops_close(struct loops *loops) {
    mem_free(loops->runs);
    *loops = (struct loops){0};
}

bool loops_note(struct loops *loops, const struct engine_loops *rule, const int32_t *tokens,
                int32_t count) {
    const int32_t last = count - 1;
    const int32_t sizes = loops->sizes < last ? loops->sizes : last;
    bool found = false;
    for (int32_t size = 1; size <= sizes; size++) {
        int32_t *run = &loops->runs[size - 1];
        *run = tokens[last] == tokens[last - size] ? *run + 1 : 0;
        found |= size >= rule->shortest && *run >= (int64_t)size * (rule->count - 1);
    }
    loops->found = found;
    return found;
}
