/* server/oai/openapi.json describes the bodies that are really read: the same fields, no more, no
 * less.
 */
#include <criterion/criterion.h>
#include <stdio.h>

#include "oai_case.h"

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

static const cJSON *properties(const cJSON *document, const struct oai_kind *kind) {
    const cJSON *all = json_get(json_get(document, "components"), "schemas");
    return json_get(json_get(all, kind->schema), "properties");
}

static bool is_field(const struct oai_kind *kind, const char *name) {
    const char *field;
    for (int i = 0; (field = oai_field_at(kind, i)); i++)
        if (strcmp(field, name) == 0) return true;
    return false;
}

Test(openapi, describes_the_fields_that_are_read) {
    cJSON *document = read_document();
    const struct oai_kind *kind;
    for (int k = 0; (kind = oai_kind_at(k)); k++) {
        const cJSON *described = properties(document, kind), *node;
        const char *field;
        cr_assert(described, "%s", kind->schema);
        for (int i = 0; (field = oai_field_at(kind, i)); i++)
            cr_assert(cJSON_GetObjectItemCaseSensitive(described, field), "%s lacks %s",
                      kind->schema, field);
        cJSON_ArrayForEach(node, described) {
            cr_assert(is_field(kind, node->string), "%s: nobody reads %s", kind->schema,
                      node->string);
        }
    }
    json_free(document);
}
