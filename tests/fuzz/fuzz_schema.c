/* JSON schemas of clients. The first byte chooses the walk, whether only objects are wanted, how
 * they are written, and whether they are closed. */
#include "base/json.h"
#include "fuzz_constrain.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const struct json_limits limits = {
        .bytes = 1 << 16, .depth = JSON_MAX_DEPTH, .unique_keys = true, .nuls = true};
    static const struct constrain_tags lines = {.open = "<parameter=",
                                                .named = ">",
                                                .gap = "",
                                                .value = "",
                                                .line = "\n",
                                                .close = "</parameter>",
                                                .after = "\n"};
    static const struct constrain_tags typed = {
        .open = "<arg_key>",
        .named = "</arg_key>",
        .gap = "\n",
        .value = "",
        .typed = {"<json>", "<json>", "<json>", "<string>", "<json>", "<json>"},
        .line = "",
        .close = "</arg_value>",
        .after = "\n"};
    static const struct constrain_tags nested = {.open = "]<",
                                                 .named = ">",
                                                 .gap = "",
                                                 .value = "",
                                                 .line = "",
                                                 .close = "]</",
                                                 .after = "",
                                                 .behind_close = ">",
                                                 .item = "item",
                                                 .raw = {"<[", "]>"}};
    static const struct constrain_notation notations[] = {
        {.brackets = "()", .assign = "=", .space = " ", .words = {"None", "False", "True"}},
        {.brackets = "{}",
         .assign = ":",
         .mark = "<|\"|>",
         .space = "",
         .words = {"null", "false", "true"}}};
    cJSON *tree;
    if (size == 0 || json_parse((const char *)data + 1, size - 1, &limits, &tree, NULL) != 0)
        return 0;
    fuzz_part(&(struct constrain_part){.kind = CONSTRAIN_SCHEMA,
                                       .field = "f",
                                       .schema = tree,
                                       .only_objects = data[0] & 19,
                                       .tags = !(data[0] & 2) ? NULL
                                               : data[0] & 16 ? &nested
                                               : data[0] & 4  ? &typed
                                                              : &lines,
                                       .notation = data[0] & 2    ? NULL
                                                   : data[0] & 16 ? &notations[data[0] >> 2 & 1]
                                                                  : NULL,
                                       .closed = data[0] & 8},
              data[0]);
    json_free(tree);
    return 0;
}
