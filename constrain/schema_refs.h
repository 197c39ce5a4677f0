/* References inside a schema document, and whether branches of oneOf exclude each other. */
#ifndef KEEPD_CONSTRAIN_SCHEMA_REFS_H
#define KEEPD_CONSTRAIN_SCHEMA_REFS_H

#include "constrain/schema_int.h"

/* Finds the schema to which `ref`, the $ref of the schema `at`, refers: a JSON pointer
 * ("#/$defs/x"), an anchor
 * ("#x"), or the $id of a schema in the document. NULL: refused, see schema_refuse. */
const cJSON *schema_resolve(struct schema *s, const cJSON *at, const cJSON *ref);

/* Can no instance satisfy both schemas? Returns true only where that is certain: their types
 * differ, their const or enum have no value in common, or they are objects that require the same
 * property with two schemas of which this is true. */
bool schema_are_apart(struct schema *s, const cJSON *a, const cJSON *b);

#endif
