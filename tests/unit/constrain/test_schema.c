/* JSON schemas: instances that belong and texts that do not, keyword by keyword; refusals by path.
 */
#include "language.h"

struct instance {
    const char *schema;
    const char *good[8], *bad[8];
};

static const struct instance instances[] = {
    {"{}", {"1", "\"x\"", "[1, {\"a\":null}]", "true"}, {"", "[1", "nul", "01", "'a'"}},
    {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"string\"},\"b\":{\"type\":\"integer\"}"
     "},"
     "\"required\":[\"b\"],\"additionalProperties\":false}",
     {"{\"b\":1}", "{\"a\":\"x\",\"b\":-7}", "{ \"a\": \"\\u00e9\", \"b\": 0 }",
      "{\n  \"b\": 1\n}"},
     {"{}", "{\"a\":\"x\"}", "{\"b\":1,\"a\":\"x\"}", "{\"b\":1.5}", "{\"b\":1,\"c\":2}",
      "{\"b\" :1}"}},
    {"{\"properties\":{\"a\":{\"type\":\"null\"}},\"type\":\"object\"}",
     {"{}", "{\"a\":null}", "{\"a\":null,\"b\":1}", "{\"z\":[]}"},
     {"{\"a\":1}", "{\"z\":1,\"a\":null}", "{\"z\":1,}"}},
    {"{\"enum\":[\"a\",1,null,{\"k\":[true]}]}",
     {"\"a\"", "1", "null", "{\"k\":[true]}", "{\"k\": [true]}"},
     {"\"b\"", "2", "{\"k\":[false]}"}},
    {"{\"const\":\"a\\\"\\n\\u0001\"}", {"\"a\\\"\\n\\u0001\""}, {"\"a\"", "\"a\\\"\\n\""}},
    {"{\"type\":[\"string\",\"null\"]}", {"null", "\"\""}, {"1", "{}"}},
    {"{\"type\":\"string\",\"minLength\":2,\"maxLength\":3}",
     {"\"ab\"", "\"日本語\"", "\"\\n\\u00e9\"", "\"\\ud83d\\ude00x\""},
     {"\"a\"", "\"abcd\"", "\"\\ud83d\"", "\"\\ud83d\\ude00\""}},
    {"{\"type\":\"string\",\"pattern\":\"b+$\"}",
     {"\"b\"", "\"abb\"", "\"\\nb\""},
     {"\"ba\"", "\"\""}},
    {"{\"type\":\"string\",\"pattern\":\"^(a|b\\\"|\\\\\\\\)*$\",\"maxLength\":3}",
     {"\"\"", "\"ab\\\"\"", "\"\\\\\\\\\""},
     {"\"c\"", "\"b\"", "\"aaaa\""}},
    {"{\"type\":\"integer\",\"minimum\":-12,\"exclusiveMaximum\":105}",
     {"-12", "0", "104", "99", "-1", "-0"},
     {"-13", "105", "1000", "1.0", "007", "-100"}},
    {"{\"type\":\"number\",\"exclusiveMinimum\":0.25,\"maximum\":1e1}",
     {"0.26", "10", "10.00", "0.251", "9.99"},
     {"0.25", "0.2500", "10.01", "0", "-1", "11", "0.1"}},
    {"{\"type\":\"number\",\"maximum\":-0.5}",
     {"-0.5", "-0.50", "-1", "-100.5"},
     {"-0.4", "0", "-0", "-0.49"}},
    {"{\"type\":\"integer\",\"multipleOf\":7,\"minimum\":10}",
     {"14", "7000", "21"},
     {"7", "15", "-14", "0"}},
    {"{\"type\":\"number\",\"multipleOf\":0.05}",
     {"0.05", "1", "-0.15", "2.5"},
     {"0.01", "0.051", "1e3"}},
    {"{\"type\":\"array\",\"items\":{\"type\":\"boolean\"},\"minItems\":1,\"maxItems\":2}",
     {"[true]", "[true,false]", "[ true, false ]"},
     {"[]", "[true,true,true]", "[1]"}},
    {"{\"type\":\"array\",\"prefixItems\":[{\"const\":1},{\"const\":2}],\"items\":false}",
     {"[]", "[1]", "[1,2]"},
     {"[2]", "[1,2,3]"}},
    {"{\"type\":\"array\",\"items\":[{\"const\":1}],\"additionalItems\":{\"const\":9},\"minItems\":"
     "2}",
     {"[1,9]", "[1,9,9]"},
     {"[1]", "[1,1]"}},
    {"{\"anyOf\":[{\"type\":\"integer\"},{\"type\":\"string\",\"maxLength\":1}]}",
     {"5", "\"a\""},
     {"\"ab\"", "null"}},
    {"{\"oneOf\":[{\"type\":\"object\",\"properties\":{\"k\":{\"const\":\"a\"}},\"required\":["
     "\"k\"]},"
     "{\"type\":\"object\",\"properties\":{\"k\":{\"const\":\"b\"},\"n\":{\"type\":\"null\"}},"
     "\"required\":[\"k\",\"n\"]}]}",
     {"{\"k\":\"a\"}", "{\"k\":\"b\",\"n\":null}"},
     {"{\"k\":\"b\"}", "{\"k\":\"c\"}", "{}"}},
    {"{\"allOf\":[{\"type\":\"integer\",\"minimum\":3},{\"maximum\":5}],\"multipleOf\":2}",
     {"4"},
     {"3", "5", "6", "2"}},
    {"{\"allOf\":[{\"properties\":{\"a\":{\"minimum\":1}},\"required\":[\"a\"]},"
     "{\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":false}}],\"type\":\"object\","
     "\"maxProperties\":1}",
     {"{\"a\":1}"},
     {"{\"a\":0}", "{\"a\":1.5}", "{\"a\":1,\"b\":1}", "{\"a\":1,\"c\":1}", "{}"}},
    {"{\"type\":\"object\",\"patternProperties\":{\"^x\":{\"type\":\"integer\"},\"y$\":{"
     "\"minimum\":5}},"
     "\"additionalProperties\":false}",
     {"{}", "{\"x\":1}", "{\"xy\":5}", "{\"ay\":\"s\"}", "{\"x\":1,\"xb\":2}"},
     {"{\"x\":1.5}", "{\"xy\":4}", "{\"a\":1}", "{\"ay\":4}"}},
    {"{\"type\":\"object\",\"additionalProperties\":{\"type\":\"integer\"},\"minProperties\":1,"
     "\"maxProperties\":2,\"propertyNames\":{\"pattern\":\"^[a-c]$\"}}",
     {"{\"a\":1}", "{\"a\":1,\"b\":2}"},
     {"{}", "{\"d\":1}", "{\"a\":1,\"b\":2,\"c\":3}", "{\"\\u0061\":1}"}},
    {"{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{},\"c\":{}},\"additionalProperties\":"
     "false,"
     "\"minProperties\":2}",
     {"{\"a\":1,\"b\":1}", "{\"a\":1,\"c\":1}", "{\"b\":1,\"c\":1}", "{\"a\":1,\"b\":1,\"c\":1}"},
     {"{\"a\":1}", "{}", "{\"c\":1,\"a\":1}"}},
    {"{\"type\":\"object\",\"required\":[\"r\"],\"additionalProperties\":{\"type\":\"null\"}}",
     {"{\"r\":null}", "{\"r\":null,\"z\":null}"},
     {"{}", "{\"r\":1}"}},
    {"{\"$defs\":{\"t\":{\"type\":\"object\",\"properties\":{\"c\":{\"type\":\"array\",\"items\":"
     "{\"$ref\":\"#/$defs/t\"}}},\"additionalProperties\":false}},\"$ref\":\"#/$defs/t\"}",
     {"{}", "{\"c\":[]}", "{\"c\":[{\"c\":[{}]},{}]}"},
     {"{\"c\":[1]}", "{\"c\":[{]}"}},
    {"{\"type\":\"array\",\"items\":{\"anyOf\":[{\"type\":\"integer\"},{\"$ref\":\"#\"}]}}",
     {"[]", "[1,[2,[]]]"},
     {"[1,[\"x\"]]"}},
    {"{\"not\":{\"type\":[\"string\",\"array\",\"object\",\"number\"]}}",
     {"true", "null"},
     {"1", "\"\""}},
    {"{\"type\":\"string\",\"not\":{\"enum\":[\"a\",\"b\"]},\"maxLength\":2}",
     {"\"c\"", "\"ab\"", "\"\""},
     {"\"a\"", "\"b\"", "\"\\u0061\""}},
    {"{\"type\":\"string\",\"format\":\"date\"}",
     {"\"2024-02-29\"", "\"1999-12-31\""},
     {"\"2023-02-29\"", "\"2023-13-01\"", "\"0000-01-01\"", "\"1900-02-29\""}},
    {"{\"type\":\"string\",\"format\":\"ipv6\"}",
     {"\"::1\"", "\"1:2:3:4:5:6:7:8\"", "\"::ffff:1.2.3.4\""},
     {"\"1::2::3\"", "\"12345::\"", "\"1:2:3:4:5:6:7\""}},
    {"{\"type\":\"string\",\"format\":\"hostname\"}",
     {"\"a.b-c.d\"", "\"x\""},
     {"\"-a\"", "\"a-\"", "\"a..b\"", "\"ab--c\"", "\"\""}},
    {"{\"type\":\"string\",\"format\":\"uri\"}",
     {"\"http://a.b/c?d#e\"", "\"urn:x:y\"", "\"mailto:a@b\""},
     {"\"a b\"", "\"//x\"", "\"http://[x]/\"", "\"%\""}},
    {"{\"type\":\"string\",\"format\":\"my-own\"}", {"\"x\""}, {"1"}},
    {"true", {"1"}, {""}},
    {"{\"type\":\"array\",\"contains\":{\"type\":\"integer\"}}",
     {"[1]", "[\"a\",1]", "[1,null,2]", "[[], {}, 3]"},
     {"[]", "[\"a\"]", "[[1]]"}},
    {"{\"contains\":{\"const\":1}}", {"[0,1]", "7", "{}"}, {"[0]", "[]"}},
    {"{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"contains\":{\"minimum\":5},"
     "\"minContains\":2,\"maxContains\":3,\"minItems\":3}",
     {"[5,6,7]", "[1,5,6]", "[1,5,2,6,3,7,4]", "[5,6,1,1,1]"},
     {"[5,6]", "[1,1,5]", "[5,6,7,8]", "[5,6,\"x\"]", "[1,1,1,5,5,5,5]"}},
    {"{\"type\":\"array\",\"contains\":{\"type\":\"string\"},\"minContains\":0,\"maxContains\":1,"
     "\"maxItems\":3}",
     {"[]", "[1]", "[1,\"a\",2]", "[1,2,3]"},
     {"[\"a\",\"b\"]", "[1,2,3,4]"}},
    {"{\"$schema\":\"http://json-schema.org/draft-07/schema#\",\"type\":\"array\",\"contains\":{"
     "\"const\":1},\"minContains\":0}",
     {"[1]", "[0,1]"},
     {"[]", "[0]"}},
    {"{\"$schema\":\"http://json-schema.org/draft-06/schema\",\"type\":\"array\",\"contains\":{"
     "\"const\":1},\"minContains\":2,\"maxContains\":0}",
     {"[1]", "[1,1,1]"},
     {"[]", "[0]"}},
    {"{\"$schema\":\"https://json-schema.org/draft/2020-12/schema\",\"type\":\"array\","
     "\"contains\":{\"const\":1},\"minContains\":0}",
     {"[]", "[0]", "[1]"},
     {"1"}},
    {"{\"type\":\"array\",\"prefixItems\":[{\"type\":\"string\"},{\"type\":\"null\"}],\"items\":{"
     "\"type\":\"integer\"},\"contains\":{\"enum\":[\"x\",7]}}",
     {"[\"x\"]", "[\"x\",null]", "[\"a\",null,7]", "[\"a\",null,1,7,2]"},
     {"[\"a\"]", "[\"a\",null,1]", "[7]", "[]"}},
    {"{\"type\":\"array\",\"items\":{\"enum\":[\"a\",\"b\",1,1.0]},\"uniqueItems\":true,"
     "\"minItems\":1}",
     {"[\"a\"]", "[\"b\",\"a\"]", "[1, \"a\", \"b\"]"},
     {"[]", "[\"a\",\"a\"]", "[1,1.0]", "[\"c\"]", "[\"a\",\"b\",\"a\"]"}},
    {"{\"type\":\"array\",\"items\":{\"enum\":[\"a\",\"b\",\"c\",\"d\",\"e\",\"f\",\"g\",\"h\","
     "\"i\"]},\"uniqueItems\":true,\"minItems\":2,\"maxItems\":3}",
     {"[\"a\",\"b\"]", "[\"a\",\"e\",\"i\"]"},
     {"[]", "[\"a\"]", "[\"a\",\"a\"]", "[\"a\",\"b\",\"c\",\"d\"]"}},
    {"{\"type\":\"array\",\"uniqueItems\":true,\"maxItems\":1}", {"[]", "[1]"}, {"[1,2]"}},
    /* Pydantic's set[Optional[E]], set[bool], and their unions. */
    {"{\"$defs\":{\"E\":{\"enum\":[\"a\",\"b\"],\"type\":\"string\"}},\"type\":\"array\","
     "\"uniqueItems\":"
     "true,\"items\":{\"anyOf\":[{\"$ref\":\"#/$defs/E\"},{\"type\":[\"boolean\",\"null\"]}]}}",
     {"[]", "[\"a\"]", "[null,\"b\",true]", "[false,true,null,\"a\",\"b\"]"},
     {"[\"a\",\"a\"]", "[null,null]", "[\"c\"]", "[1]"}},
    /* Values that cannot be listed: a reader may check that they differ. */
    {"{\"type\":\"array\",\"uniqueItems\":true,\"items\":{\"type\":\"string\"},\"minItems\":1,"
     "\"maxItems\":2}",
     {"[\"a\"]", "[\"a\",\"b\"]", "[\"a\",\"a\"]"},
     {"[]", "[1]", "[\"a\",\"b\",\"c\"]"}},
    {"{\"contains\":{\"const\":1},\"uniqueItems\":true}", {"[1]", "[0,1]"}, {"[]", "[0]"}},
    {"{\"type\":\"array\",\"prefixItems\":[{\"const\":1}],\"uniqueItems\":true}",
     {"[1]", "[1,2]"},
     {"[2]"}},
    {"{\"type\":\"array\",\"uniqueItems\":true,\"items\":{\"anyOf\":[{\"const\":1},{\"type\":"
     "\"string\"}]}}",
     {"[]", "[1,\"a\"]"},
     {"[2]"}},
    /* dict[E, int]; a name that is listed is written once, in the order of the list. */
    {"{\"$defs\":{\"E\":{\"enum\":[\"a\",\"b\",\"c\"],\"type\":\"string\"}},\"type\":\"object\","
     "\"additionalProperties\":{\"type\":\"integer\"},\"propertyNames\":{\"$ref\":\"#/$defs/E\"},"
     "\"minProperties\":2}",
     {"{\"a\":1,\"b\":2}", "{\"a\":1,\"c\":2}", "{\"a\":1,\"b\":2,\"c\":3}"},
     {"{\"a\":1}", "{\"a\":1,\"a\":2}", "{\"d\":1,\"a\":1}", "{\"a\":1,\"b\":\"x\"}", "{}"}},
    {"{\"type\":\"object\",\"propertyNames\":{\"enum\":[\"p\",\"q\\n\",7]}}",
     {"{}", "{\"p\":1}", "{\"p\":null,\"q\\n\":[]}", "{\"q\\n\":1}"},
     {"{\"r\":1}", "{\"q\":1}", "{\"7\":1}"}},
    {"{\"type\":\"object\",\"propertyNames\":{\"anyOf\":[{\"const\":\"a\"},{\"pattern\":\"^x\","
     "\"not\":{\"const\":\"xx\"}}],\"maxLength\":3}}",
     {"{}", "{\"a\":1}", "{\"xy\":1,\"a\":2}"},
     {"{\"b\":1}", "{\"xx\":1}", "{\"xabc\":1}"}},
    {"{\"type\":\"object\",\"propertyNames\":{\"type\":\"integer\"}}", {"{}"}, {"{\"1\":1}"}},
    {"{\"type\":\"object\",\"propertyNames\":false}", {"{}"}, {"{\"a\":1}"}},
    {"{\"type\":\"string\",\"format\":\"regex\"}", {"\"(a|b)+\"", "\"\""}, {"1"}},
    {"{\"type\":\"string\",\"format\":\"iri\"}", {"\"http://\u00e9/\""}, {"1"}},
    /* Unions of pydantic: the discriminator's member has a default, or an enum. */
    {"{\"$defs\":{\"C\":{\"type\":\"object\",\"properties\":{\"kind\":{\"const\":\"cat\",\"type\":"
     "\"string\"},\"n\":{\"type\":\"integer\"}},\"required\":[\"kind\",\"n\"]},\"D\":{\"type\":"
     "\"object\","
     "\"properties\":{\"kind\":{\"default\":\"dog\",\"enum\":[\"dog\",\"hound\"]},\"n\":{\"type\":"
     "\"integer\"}},\"required\":[\"n\"]}},\"discriminator\":{\"propertyName\":\"kind\","
     "\"mapping\":{"
     "\"cat\":\"#/$defs/C\",\"dog\":\"#/$defs/D\",\"hound\":\"#/$defs/D\"}},\"oneOf\":[{\"$ref\":"
     "\"#/$defs/C\"},{\"$ref\":\"#/$defs/D\"}]}",
     {"{\"kind\":\"cat\",\"n\":1}", "{\"kind\":\"dog\",\"n\":1}", "{\"kind\":\"hound\",\"n\":1}"},
     {"{\"n\":1}", "{\"kind\":\"cow\",\"n\":1}", "{\"kind\":\"dog\"}"}},
    /* The same without a discriminator; and with a union inside the union. */
    {"{\"oneOf\":[{\"type\":\"object\",\"properties\":{\"k\":{\"const\":1},\"n\":{\"type\":"
     "\"integer\"}}},{\"type\":\"object\",\"properties\":{\"k\":{\"enum\":[2,3]},\"n\":{\"type\":"
     "\"integer\"}}}]}",
     {"{\"k\":1}", "{\"k\":2,\"n\":1}", "{\"k\":3}"},
     {"{}", "{\"n\":1}", "{\"k\":4}"}},
    {"{\"discriminator\":{\"propertyName\":\"k\"},\"oneOf\":[{\"properties\":{\"k\":{\"const\":"
     "\"a\"},"
     "\"n\":{\"type\":\"integer\"}}},{\"oneOf\":[{\"properties\":{\"s\":{\"const\":\"x\"},\"k\":{"
     "\"const\":\"b\"},\"n\":{\"type\":\"integer\"}}},{\"properties\":{\"s\":{\"const\":\"y\"},"
     "\"k\":"
     "{\"const\":\"b\"}}}]}]}",
     {"{\"k\":\"a\"}", "{\"s\":\"x\",\"k\":\"b\"}", "{\"s\":\"y\",\"k\":\"b\"}"},
     {"{}", "{\"s\":\"x\"}", "{\"k\":\"b\"}", "{\"s\":\"z\",\"k\":\"b\"}"}},
    /* OpenAPI: the mapping, not the branches, has the values. */
    {"{\"$defs\":{\"A\":{\"type\":\"object\",\"properties\":{\"t\":{\"type\":\"string\"},\"n\":{"
     "\"type\":\"integer\"}}},\"B\":{\"type\":\"object\",\"properties\":{\"t\":{\"type\":"
     "\"string\"},"
     "\"m\":{\"type\":\"integer\"}}}},\"discriminator\":{\"propertyName\":\"t\",\"mapping\":{\"a\":"
     "\"A\",\"b\":\"#/$defs/B\"}},\"oneOf\":[{\"$ref\":\"#/$defs/A\"},{\"$ref\":\"#/$defs/B\"}]}",
     {"{\"t\":\"a\",\"n\":1}", "{\"t\":\"b\",\"m\":1}"},
     {"{\"t\":\"c\"}", "{\"n\":1}", "{\"t\":\"a\",\"n\":\"x\"}"}},
    /* A member that the other branch forbids. */
    {"{\"oneOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}},\"required\":["
     "\"a\"],\"additionalProperties\":false},{\"type\":\"object\",\"properties\":{\"b\":{\"type\":"
     "\"integer\"}},\"required\":[\"b\"],\"additionalProperties\":false}]}",
     {"{\"a\":1}", "{\"b\":1}"},
     {"{}", "{\"a\":1,\"b\":1}"}},
    {"{\"oneOf\":[{\"const\":9007199254740993},{\"const\":9007199254740992}]}",
     {"9007199254740993", "9007199254740992"},
     {"9007199254740994"}},
    {"{\"not\":{\"required\":[\"a\"]}}", {"{}", "{\"b\":1}"}, {"{\"a\":1}", "1"}},
    {"{\"type\":\"object\",\"properties\":{\"k\":{\"enum\":[\"x\",\"y\"]},\"n\":{\"type\":"
     "\"integer\"}},"
     "\"required\":[\"k\"],\"additionalProperties\":false,\"if\":{\"properties\":{\"k\":{\"const\":"
     "\"x\"}}},\"then\":{\"required\":[\"n\"]},\"else\":{\"properties\":{\"n\":{\"minimum\":5}}}}",
     {"{\"k\":\"x\",\"n\":1}", "{\"k\":\"y\"}", "{\"k\":\"y\",\"n\":5}"},
     {"{\"k\":\"x\"}", "{\"k\":\"y\",\"n\":1}"}},
    {"{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{},\"c\":{}},\"additionalProperties\":"
     "false,"
     "\"dependentRequired\":{\"a\":[\"b\"]},\"dependentSchemas\":{\"c\":{\"properties\":{\"b\":{"
     "\"type\":\"null\"}}}}}",
     {"{}", "{\"b\":1}", "{\"a\":1,\"b\":1}", "{\"c\":1}", "{\"b\":null,\"c\":1}"},
     {"{\"a\":1}", "{\"b\":1,\"c\":1}", "{\"a\":1,\"c\":1}"}},
    {"{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{}},\"additionalProperties\":false,"
     "\"oneOf\":[{\"required\":[\"a\"]},{\"required\":[\"b\"]}]}",
     {"{\"a\":1}", "{\"b\":1}"},
     {"{}", "{\"a\":1,\"b\":1}"}},
    {"{\"oneOf\":[{\"type\":\"number\",\"maximum\":5},{\"type\":\"number\",\"minimum\":3}]}",
     {"2.5", "6", "-1"},
     {"3", "4.5", "5"}},
    {"{\"not\":{\"anyOf\":[{\"type\":[\"object\",\"array\"]},{\"enum\":[\"a\",1,true,null]}]}}",
     {"\"c\"", "2", "1.5", "false"},
     {"\"a\"", "1", "1.0", "true", "null", "{}"}},
    {"{\"not\":{\"anyOf\":[{\"pattern\":\"^b\"},{\"minLength\":3}]}}",
     {"\"c\"", "\"\""},
     {"\"b\"", "\"xyz\"", "1"}},
    {"{\"type\":\"string\",\"not\":{\"pattern\":\"[0-9]\"}}", {"\"a\""}, {"\"a1\"", "1"}},
    /* Draft 4 names parts with "id". */
    {"{\"definitions\":{\"x\":{\"id\":\"#part\",\"const\":1}},\"allOf\":[{\"$ref\":\"#part\"}]}",
     {"1"},
     {"2"}},
    /* A schema that a rewritten keyword copies keeps the resource of its references. */
    {"{\"$defs\":{\"v\":{\"const\":\"outer\"}},\"allOf\":[{\"$id\":\"http://x/in\",\"$defs\":"
     "{\"v\":{\"const\":\"inner\"}},\"if\":{\"type\":\"string\"},\"then\":{\"$ref\":"
     "\"#/$defs/v\"}}]}",
     {"\"inner\"", "1"},
     {"\"outer\"", "\"\""}},
    {"{\"$defs\":{\"v\":{\"const\":1}},\"allOf\":[{\"$id\":\"http://x/in\",\"$defs\":{\"v\":"
     "{\"required\":[\"b\"]}},\"type\":\"object\",\"dependentSchemas\":{\"a\":{\"$ref\":"
     "\"#/$defs/v\"}}}]}",
     {"{}", "{\"b\":1}"},
     {"{\"a\":1}", "1"}},
};

/* Arguments of tools: an object that declares members has no others. */
static const struct instance arguments[] = {
    {"{\"type\":\"object\",\"properties\":{}}", {"{}"}, {"{\"a\":1}"}},
    {"{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}}}",
     {"{}", "{\"a\":1}"},
     {"{\"b\":1}", "{\"a\":1,\"b\":1}"}},
    {"{\"properties\":{\"a\":{}},\"additionalProperties\":null}", {"{\"a\":1}"}, {"{\"b\":1}"}},
    {"{\"properties\":{\"a\":{}},\"additionalProperties\":true}", {"{\"a\":1,\"b\":1}"}, {"1"}},
    {"{\"properties\":{\"a\":{}},\"additionalProperties\":{\"type\":\"null\"}}",
     {"{\"a\":1,\"b\":null}"},
     {"{\"b\":1}"}},
    {"{\"properties\":{\"a\":{}},\"unevaluatedProperties\":true}", {"{\"b\":1}"}, {"1"}},
    /* Objects inside: one that declares nothing takes anything. */
    {"{\"properties\":{\"o\":{\"type\":\"object\"},\"p\":{\"type\":\"object\",\"properties\":{"
     "\"x\":{"
     "}}}}}",
     {"{\"o\":{\"z\":1}}", "{\"p\":{\"x\":1}}"},
     {"{\"p\":{\"z\":1}}", "{\"o\":1}"}},
    {"{\"$defs\":{\"A\":{\"type\":\"object\",\"properties\":{\"x\":{},\"next\":{\"$ref\":\"#/$defs/"
     "A\"}}}"
     "},\"properties\":{\"l\":{\"type\":\"array\",\"items\":{\"$ref\":\"#/$defs/A\"}}}}",
     {"{\"l\":[{\"x\":1,\"next\":{\"x\":2}}]}"},
     {"{\"l\":[{\"y\":1}]}", "{\"l\":[{\"next\":{\"y\":2}}]}"}},
    /* Parts of allOf and anyOf declare members together. */
    {"{\"allOf\":[{\"properties\":{\"a\":{}}},{\"properties\":{\"b\":{}}}],\"type\":\"object\"}",
     {"{\"a\":1,\"b\":1}"},
     {"{\"c\":1}"}},
    {"{\"properties\":{\"a\":{}},\"anyOf\":[{\"required\":[\"a\"]},{\"properties\":{\"b\":{}},"
     "\"required\":[\"b\"]}]}",
     {"{\"a\":1}", "{\"a\":1,\"b\":2}", "{\"b\":2}"},
     {"{}", "{\"a\":1,\"c\":1}"}},
    {"{\"properties\":{\"a\":{}},\"required\":[\"b\"]}",
     {"{\"b\":1}", "{\"a\":1,\"b\":1}"},
     {"{}"}},
    {"{\"properties\":{\"a\":{}},\"patternProperties\":{\"^x\":{\"type\":\"null\"}}}",
     {"{\"a\":1,\"xy\":null}"},
     {"{\"b\":1}", "{\"xy\":1}"}},
    {"{\"type\":\"object\",\"dependentRequired\":{\"a\":[\"b\"]}}",
     {"{\"c\":1}", "{\"b\":1,\"a\":1}"},
     {"{\"a\":1}"}},
    {"{\"properties\":{\"a\":{}},\"minProperties\":1}", {"{\"a\":1}"}, {"{\"b\":1}", "{}"}},
    {"{\"type\":\"object\",\"propertyNames\":{\"enum\":[\"a\"]}}", {"{\"a\":1}"}, {"{\"b\":1}"}},
};

static void check_instances(const struct instance *in, bool closed) {
    struct language l = closed ? language_arguments(in->schema) : language_schema(in->schema);
    cr_assert_eq(l.rc, 0, "%s: %s: %s", in->schema, l.fault.field, l.fault.text);
    for (int k = 0; k < 8 && in->good[k]; k++)
        cr_expect(language_holds(&l, in->good[k]), "%s holds %s", in->schema, in->good[k]);
    for (int k = 0; k < 8 && in->bad[k]; k++)
        cr_expect_not(language_holds(&l, in->bad[k]), "%s does not hold %s", in->schema,
                      in->bad[k]);
    language_close(&l);
}

Test(schema, instances_belong_and_others_do_not) {
    for (size_t i = 0; i < sizeof instances / sizeof *instances; i++)
        check_instances(&instances[i], false);
}

Test(schema, arguments_have_no_undeclared_members) {
    for (size_t i = 0; i < sizeof arguments / sizeof *arguments; i++)
        check_instances(&arguments[i], true);
}

/* Without an opposite for each pair of branches, which would multiply. */
Test(schema, a_member_tells_many_branches_apart) {
    struct buf text;
    buf_open(&text, 1 << 20);
    buf_str(&text, "{\"oneOf\":[");
    for (int i = 0; i < 60; i++)
        buf_fmt(&text,
                "%s{\"type\":\"object\",\"properties\":{\"kind\":{\"const\":\"k%d\",\"default\":"
                "\"k%d\"}"
                ",\"text\":{\"type\":\"string\"}},\"required\":[\"text\"]}",
                i ? "," : "", i, i);
    buf_str(&text, "]}");
    struct language l = language_schema(text.data);
    cr_assert_eq(l.rc, 0, "%s: %s", l.fault.field, l.fault.text);
    cr_assert(language_holds(&l, "{\"kind\":\"k59\",\"text\":\"x\"}"));
    cr_assert_not(language_holds(&l, "{\"text\":\"x\"}"));
    language_close(&l);
    buf_close(&text);
}

static const struct {
    const char *schema, *field;
    int rc;
} refusals[] = {
    {"{\"contains\":{\"items\":{}},\"maxContains\":1}", "f.maxContains", ERR_UNSUPPORTED},
    {"{\"contains\":{},\"allOf\":[{\"contains\":{}}]}", "f.allOf[0].contains", ERR_UNSUPPORTED},
    {"{\"contains\":{},\"maxItems\":100000}", "f.contains", ERR_LIMIT},
    {"{\"properties\":{\"a\":{\"items\":{\"if\":{\"multipleOf\":2},\"then\":false}}}}",
     "f.properties.a.items.if", ERR_UNSUPPORTED},
    {"{\"allOf\":[{},{\"dependentRequired\":[]}]}", "f.allOf[1].dependentRequired", ERR_INVALID},
    {"{\"$defs\":{\"a\":{\"not\":{\"$ref\":\"#/$defs/a\"}}},\"$ref\":\"#/$defs/a\"}",
     "f.$defs.a.not", ERR_UNSUPPORTED},
    {"{\"$ref\":\"http://x/y\"}", "f.$ref", ERR_UNSUPPORTED},
    {"{\"$ref\":\"#/nowhere\"}", "f.$ref", ERR_INVALID},
    {"{\"type\":\"string\",\"pattern\":\"(\"}", "f.pattern", ERR_INVALID},
    {"{\"type\":\"string\",\"pattern\":\"\\\\b\"}", "f.pattern", ERR_UNSUPPORTED},
    {"{\"type\":\"sting\"}", "f.type", ERR_INVALID},
    {"{\"oneOf\":[{\"type\":\"integer\"},{\"minimum\":2}]}", "f.oneOf", ERR_UNSUPPORTED},
    {"{\"not\":{\"items\":{}}}", "f.not", ERR_UNSUPPORTED},
    {"{\"type\":\"integer\",\"minimum\":5,\"maximum\":3}", "f", ERR_INVALID},
    {"{\"type\":\"object\",\"properties\":{\"a\":false},\"required\":[\"a\"]}", "f", ERR_INVALID},
    {"{\"type\":\"object\",\"properties\":{\"a\":{\"$ref\":\"#\"}},\"required\":[\"a\"]}", "f",
     ERR_INVALID},
    {"false", "f", ERR_INVALID},
    {"{\"type\":\"integer\",\"multipleOf\":0}", "f.multipleOf", ERR_INVALID},
    {"{\"type\":\"string\",\"minLength\":-1}", "f.minLength", ERR_INVALID},
    {"{\"type\":\"string\",\"minLength\":9999999}", "f.minLength", ERR_LIMIT},
    {"{\"minProperties\":3}", "f.minProperties", ERR_UNSUPPORTED},
    {"{\"properties\":{\"a\":3}}", "f.properties.a", ERR_INVALID},
    {"{\"type\":\"object\",\"properties\":[{},{}]}", "f.properties", ERR_INVALID},
    {"{\"type\":\"object\",\"patternProperties\":[{}]}", "f.patternProperties", ERR_INVALID},
    {"{\"type\":\"object\",\"propertyNames\":[1]}", "f.propertyNames", ERR_INVALID},
    {"{\"oneOf\":[{\"type\":\"object\",\"properties\":[1]},"
     "{\"type\":\"object\",\"properties\":{\"x\":{}}}]}",
     "f.oneOf", ERR_UNSUPPORTED},
};

Test(schema, what_is_not_enforced_is_refused_by_its_path) {
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        struct language l = language_schema(refusals[i].schema);
        cr_assert_eq(l.rc, refusals[i].rc, "%s: %d %s", refusals[i].schema, l.rc, l.fault.text);
        cr_assert_str_eq(l.fault.field, refusals[i].field, "%s", refusals[i].schema);
        language_close(&l);
    }
}

/* Ten thousand values, deep nesting, many optional names: compiled within the limits, or refused.
 */
Test(schema, hostile_schemas_end) {
    struct buf text;
    buf_open(&text, 1 << 24);
    buf_str(&text, "{\"enum\":[");
    for (int i = 0; i < 10000; i++) buf_fmt(&text, "%s\"value %d\"", i ? "," : "", i * 7919);
    buf_str(&text, "]}");
    struct language l = language_schema(text.data);
    cr_assert_eq(l.rc, 0, "%s", l.fault.text);
    cr_assert(language_holds(&l, "\"value 7919\"") && !language_holds(&l, "\"value 7920\""));
    language_close(&l);
    buf_clear(&text);
    buf_str(&text, "{\"type\":\"object\",\"properties\":{");
    for (int i = 0; i < 2000; i++)
        buf_fmt(&text, "%s\"p%d\":{\"type\":\"integer\"}", i ? "," : "", i);
    buf_str(&text, "},\"additionalProperties\":false}");
    l = language_schema(text.data);
    cr_assert_eq(l.rc, 0, "%s", l.fault.text);
    cr_assert(language_holds(&l, "{\"p7\":1,\"p1999\":2}"));
    language_close(&l);
    buf_clear(&text);
    for (int i = 0; i < 200; i++) buf_str(&text, "{\"anyOf\":[{\"type\":\"null\"},");
    buf_str(&text, "{}");
    for (int i = 0; i < 200; i++) buf_str(&text, "]}");
    l = language_schema(text.data);
    cr_assert(l.rc == 0 || l.rc == ERR_LIMIT);
    language_close(&l);
    buf_close(&text);
}

static void repeat(struct buf *out, const char *text, int count) {
    for (int i = 0; i < count; i++) buf_str(out, text);
}

static int open_twice(const char *before, const char *between, const char *after, int depth) {
    struct buf schema;
    buf_open(&schema, 1 << 20);
    const char *const parts[] = {before, between};
    for (int i = 0; i < 2; i++) {
        buf_str(&schema, parts[i]);
        repeat(&schema, "{\"a\":", depth);
        buf_str(&schema, "1");
        repeat(&schema, "}", depth);
    }
    buf_str(&schema, after);
    struct language l = language_schema(schema.data);
    int rc = l.rc;
    language_close(&l);
    buf_close(&schema);
    return rc;
}

/* Comparing equal values takes no time that doubles with each level. */
Test(schema, deep_values_are_compared_once) {
    cr_assert_eq(open_twice("{\"enum\":[", ",", "]}", 60), 0);
    cr_assert_eq(open_twice("{\"allOf\":[{\"const\":", "},{\"const\":", "}]}", 60), 0);
}

/* Ten members that refer back to their object, all required: 10^16 pairs within the depth. */
Test(schema, recursive_branches_are_told_apart_within_the_limit) {
    struct buf schema;
    buf_open(&schema, 1 << 20);
    buf_str(&schema, "{\"$defs\":{\"A\":{\"type\":\"object\",\"properties\":{");
    for (int i = 0; i < 10; i++)
        buf_fmt(&schema, "%s\"%d\":{\"$ref\":\"#/$defs/A\"}", i ? "," : "", i);
    buf_str(&schema, "},\"required\":[\"0\"");
    for (int i = 1; i < 10; i++) buf_fmt(&schema, ",\"%d\"", i);
    buf_str(&schema, "]}},\"oneOf\":[{\"$ref\":\"#/$defs/A\"},{\"$ref\":\"#/$defs/A\"}]}");
    struct language l = language_schema(schema.data);
    cr_assert(l.rc == ERR_LIMIT || l.rc == ERR_UNSUPPORTED, "%d %s", l.rc, l.fault.text);
    language_close(&l);
    buf_close(&schema);
}

/* Long and deeply nested expressions need no deep stack. */
Test(schema, long_expressions_need_no_deep_stack) {
    static const struct {
        const char *before, *text;
        int count;
        const char *after;
        int rc;
    } cases[] = {{"", "(?=", 100000, "", ERR_LIMIT},
                 {"a", "*", 500000, "", ERR_LIMIT},
                 {"a", "{2}", 1000, "", ERR_LIMIT},
                 {"", "a", 100000, "(?!b)c", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct buf text;
        buf_open(&text, 1 << 20);
        buf_str(&text, cases[i].before);
        repeat(&text, cases[i].text, cases[i].count);
        buf_str(&text, cases[i].after);
        struct language l = language_text(CONSTRAIN_REGEX, text.data);
        cr_assert_eq(l.rc, cases[i].rc, "%s: %d %s", cases[i].text, l.rc, l.fault.text);
        if (l.rc == 0) cr_assert_not(language_holds(&l, "b"));
        language_close(&l);
        buf_close(&text);
    }
}

/* References stay in the resource (a schema with $id) in which they stand. A name that could be
 * another one is refused. */
Test(schema, references_know_their_resource) {
    struct language l = language_schema(
        "{\"$id\":\"http://x/a\",\"$ref\":\"b#n\",\"$defs\":{\"B\":{\"$id\":\"b\",\"$defs\":{"
        "\"own\":{\"$anchor\":\"n\",\"type\":\"array\",\"items\":{\"$ref\":\"#/$defs/v\"}},"
        "\"v\":{\"type\":\"null\"}}},\"n\":{\"$anchor\":\"n\",\"type\":\"string\"},"
        "\"v\":{\"type\":\"integer\"}}}");
    cr_assert_eq(l.rc, 0, "%s: %s", l.fault.field, l.fault.text);
    cr_assert(language_holds(&l, "[null]") && !language_holds(&l, "[1]"));
    cr_assert_not(language_holds(&l, "\"x\""));
    language_close(&l);
    l = language_schema(
        "{\"$defs\":{\"a\":{\"$anchor\":\"n\",\"type\":\"null\"},\"b\":{\"$anchor\":"
        "\"n\",\"type\":\"string\"}},\"$ref\":\"#n\"}");
    cr_assert_eq(l.rc, ERR_INVALID);
    language_close(&l);
}
