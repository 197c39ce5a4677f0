/* server/oai/openapi.json describes the bodies that are really read: the same fields, no more, no
 * less.
 */
#include <criterion/criterion.h>
#include <stdio.h>

#include "oai_case.h"

static const char *const schemas[OAI_KINDS] = {
    [OAI_CHAT] = "ChatRequest",         [OAI_COMPLETION] = "CompletionRequest",
    [OAI_TOKENIZE] = "TokenizeRequest", [OAI_DETOKENIZE] = "DetokenizeRequest",
    [OAI_TEMPLATE] = "TemplateRequest",
};

static cJSON *read_document(void) {
    static char text[1 << 20];
    const struct json_limits limits = {.bytes = sizeof text, .depth = 64, .unique_keys = true};
    struct fault fault;
    cJSON *document = NULL;
    FILE *file = fopen(KEEPD_SOURCE_DIR "/server/oai/openapi.json", "rb");
    cr_assert(file);
    size_t size = fread(text, 1, sizeof text, file);
    fclose(file);
    cr_assert_eq(json_parse(text, size, &limits, &document, &fault), 0, "%s", fault.text);
    return document;
}

static const cJSON *properties(const cJSON *document, enum oai_kind kind) {
    const cJSON *all = json_get(json_get(document, "components"), "schemas");
    return json_get(json_get(all, schemas[kind]), "properties");
}

static bool is_field(enum oai_kind kind, const char *name) {
    const char *field;
    for (int i = 0; (field = oai_field_at(kind, i)); i++)
        if (strcmp(field, name) == 0) return true;
    return false;
}

Test(openapi, describes_the_fields_that_are_read) {
    cJSON *document = read_document();
    for (int kind = 0; kind < OAI_KINDS; kind++) {
        const cJSON *described = properties(document, (enum oai_kind)kind), *node;
        const char *field;
        cr_assert(described, "%s", schemas[kind]);
        for (int i = 0; (field = oai_field_at((enum oai_kind)kind, i)); i++)
            cr_assert(cJSON_GetObjectItemCaseSensitive(described, field), "%s lacks %s",
                      schemas[kind], field);
        cJSON_ArrayForEach(node, described) {
            cr_assert(is_field((enum oai_kind)kind, node->string), "%s: nobody reads %s",
                      schemas[kind], node->string);
        }
    }
    json_free(document);
}
