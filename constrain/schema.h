/* JSON Schema (2020-12, and the older spellings of the same keywords) as expressions.
 *
 * The instances of a schema are written in one order: members in the order in which the schema
 * declares them, then required members that it does not declare, then all others. Strings of enum,
 * const and names are written in one way (constrain/json.h). Every written text is a valid
 * instance; some valid instances cannot be written so.
 *
 * Enforced: type, enum, const, properties, patternProperties, additionalProperties, required,
 * propertyNames, minProperties, maxProperties, items, prefixItems, additionalItems, minItems,
 * maxItems, contains, minContains, minLength, maxLength (in code points), pattern, format, minimum,
 * maximum, exclusiveMinimum, exclusiveMaximum, multipleOf, anyOf, allOf, $ref within the document;
 * not, if, dependencies (also as dependentRequired and dependentSchemas), maxContains and oneOf
 * where the opposites that they need can be written (schema_rewrite.c). A oneOf is also decided by
 * a member that is apart in each two branches, which is then always written: the discriminator's,
 * or one with const or enum. uniqueItems is enforced where enum, const, boolean and null give the
 * values of the elements; other elements would have to be compared with all that were written
 * before, which states of an automaton cannot do, so a reader may find equal ones. Refused with its
 * path: every other keyword that could make an instance invalid, and a $ref to another document.
 * Keywords that no standard defines are annotations: they are ignored. */
#ifndef KEEPD_CONSTRAIN_SCHEMA_H
#define KEEPD_CONSTRAIN_SCHEMA_H

#include "constrain/constrain.h"
#include "constrain/json.h"

/* How an instance is written. */
enum schema_form {
    SCHEMA_JSON, /* JSON */
    /* An object, written as one tag for each member (struct constrain_tags), in the order of the
     * names. Members that the schema does not name are left out. Each VALUE is a SCHEMA_TEXT; its
     * types are those that constrain_types returns for the member's schema in `properties` of the
     * outermost schema. */
    SCHEMA_TAGGED,
    /* A string as its characters, which must not contain the tag's end and must not look like a
     * value of another allowed type (server/oai/tool_tags.h); or a value of another type, as JSON.
     * If values nest, arrays and objects are tags, too. Those that are empty, arrays with contains
     * or uniqueItems, and objects whose schema gives no names, or names that no tag can have, are
     * JSON. Where any type is read, a string that looks like another value has quotes if it cannot
     * be written in another way. */
    SCHEMA_TEXT,
    SCHEMA_ARGUMENTS, /* the outermost object in a notation (struct constrain_notation) */
    SCHEMA_PLAIN,     /* strings as their characters, and nothing else: names of members */
};

struct schema_options {
    bool only_objects; /* only instances that are objects */
    /* Schemas of arguments declare all members, whatever the standard says. So an object that has
     * `properties` has no other members, unless it has additionalProperties or
     * unevaluatedProperties that are not false, or a minProperties above their number. Members that
     * match patternProperties and those of `required` are declared, too. An object without
     * `properties` takes any members. */
    bool closed;
    enum schema_form form;
    const struct constrain_tags *tags; /* for SCHEMA_TAGGED: how the tags are written */
    const char *field; /* path of the schema in the request, which begins the paths in faults */
};

/* ERR_INVALID: not a schema, or one without an instance. */
int schema_compile(struct json_nodes *nodes, const cJSON *schema,
                   const struct schema_options *options, uint32_t *out, struct fault *fault);

#endif
