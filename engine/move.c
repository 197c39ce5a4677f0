/* The calls that move conversations; the state directory does the work (engine/disk/store_move.h).
 * An upload of the engine is one of the store. */
#include "engine/disk/store_move.h"
#include "engine/engine_int.h"

static int no_directory(struct fault *fault) {
    return fault_set(fault, ERR_UNSUPPORTED, "state-dir",
                     "this server has no state directory (--state-dir)");
}

int engine_state_open(struct engine *e, uint64_t id, int *fd, uint64_t *bytes,
                      struct fault *fault) {
    struct store *store = e->replicas[0].store;
    return store ? store_open_file(store, id, fd, bytes, fault) : no_directory(fault);
}

int64_t engine_upload_max(const struct engine *e) {
    const struct store *store = e->replicas[0].store;
    return store ? store_upload_max(store) : -1;
}

int engine_upload_open(struct engine *e, const uint8_t space[16], struct engine_upload **out,
                       struct fault *fault) {
    struct store *store = e->replicas[0].store;
    *out = NULL;
    return store ? store_upload_open(store, space, (struct store_upload **)out, fault)
                 : no_directory(fault);
}

int engine_upload_add(struct engine_upload *upload, const char *data, size_t size,
                      struct fault *fault) {
    return store_upload_add((struct store_upload *)upload, data, size, fault);
}

int engine_upload_end(struct engine_upload *upload, struct engine_conversation_row *row,
                      struct fault *fault) {
    struct store_row file = {0};
    int rc = store_upload_end((struct store_upload *)upload, &file, fault);
    *row = (struct engine_conversation_row){
        .id = file.id, .replica = -1, .tokens = file.tokens, .disk_bytes = file.bytes};
    return rc;
}

void engine_upload_close(struct engine_upload *upload) {
    store_upload_close((struct store_upload *)upload);
}
