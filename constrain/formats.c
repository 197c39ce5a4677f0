/* Formats of JSON Schema 2020-12 as regular expressions, from the documents that it names: RFC 3339
 * (dates; ISO 8601 durations from its appendix), RFC 5321 (email), RFC 1123 (host names), RFC 2673
 * and RFC 4291 (addresses), RFC 3986 (URI), RFC 4122 (UUID), RFC 6901 (JSON pointer). Where a
 * document leaves a choice, the narrower form is taken, so that every reader accepts a generated
 * text. The standard's other formats (regex, idn-email, idn-hostname, iri, iri-reference,
 * uri-template) are not enforced: groups of a regular expression can nest without end, and the
 * others need tables of Unicode. A reader that needs them can check them. */
#include "constrain/formats.h"

#include <stddef.h>
#include <string.h>

/* Dates of the Gregorian calendar. */
#define LEAP_YEAR "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
#define DATE                                                                                       \
    "(?!0000)(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"                         \
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|" LEAP_YEAR "-02-29)"
#define HOUR_MINUTE "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
#define TIME        HOUR_MINUTE ":[0-5][0-9](?:\\.[0-9]{1,9})?(?:[Zz]|[+-]" HOUR_MINUTE ")"

#define BYTE_NUMBER "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
#define IPV4        BYTE_NUMBER "(?:\\." BYTE_NUMBER "){3}"
#define H16         "[0-9A-Fa-f]{1,4}"
#define LS32        "(?:" H16 ":" H16 "|" IPV4 ")"
#define IPV6                                                                                       \
    "(?:(?:" H16 ":){6}" LS32 "|::(?:" H16 ":){5}" LS32 "|(?:" H16 ")?::(?:" H16 ":){4}" LS32      \
    "|(?:(?:" H16 ":){0,1}" H16 ")?::(?:" H16 ":){3}" LS32 "|(?:(?:" H16 ":){0,2}" H16             \
    ")?::(?:" H16 ":){2}" LS32 "|(?:(?:" H16 ":){0,3}" H16 ")?::" H16 ":" LS32 "|(?:(?:" H16       \
    ":){0,4}" H16 ")?::" LS32 "|(?:(?:" H16 ":){0,5}" H16 ")?::" H16 "|(?:(?:" H16 ":){0,6}" H16   \
    ")?::)"

/* No label has "--" in its third place, which IDNA reserves. */
#define LABEL    "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#define HOSTNAME "(?!(?:.*\\.)?..--)(?=.{1,253}$)" LABEL "(?:\\." LABEL ")*"

#define ESCAPED "%[0-9A-Fa-f]{2}"
#define PCHAR   "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|" ESCAPED ")"
#define AUTHORITY                                                                                  \
    "(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|" ESCAPED ")*@)?(?:\\[" IPV6                                \
    "\\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|" ESCAPED ")*)(?::[0-9]*)?"
#define SEGMENTS "(?:/" PCHAR "*)*"
#define TAIL     "(?:\\?(?:" PCHAR "|[/?])*)?(?:#(?:" PCHAR "|[/?])*)?"
#define ABSOLUTE "/(?:" PCHAR "+" SEGMENTS ")?"
#define URI                                                                                        \
    "[A-Za-z][A-Za-z0-9+.-]*:(?://" AUTHORITY SEGMENTS "|" ABSOLUTE "|" PCHAR "+" SEGMENTS "|"     \
    ")" TAIL
#define RELATIVE                                                                                   \
    "(?://" AUTHORITY SEGMENTS "|" ABSOLUTE "|(?:[A-Za-z0-9._~!$&'()*+,;=@-]|" ESCAPED             \
    ")+" SEGMENTS "|)" TAIL

#define POINTER "(?:/(?:[^~/]|~[01])*)*"

static const struct {
    const char *name, *pattern;
} formats[] = {
    {"date", DATE},
    {"time", TIME},
    {"date-time", DATE "[Tt]" TIME},
    {"duration", "P(?:[0-9]+W|(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
                 "(?:T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))?"
                 "|T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))"},
    {"email", "@" LABEL "(?:\\." LABEL ")+"},
    {"hostname", HOSTNAME},
    {"ipv4", IPV4},
    {"ipv6", IPV6},
    {"uuid", "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}"},
    {"uri", URI},
    {"uri-reference", "(?:" URI "|" RELATIVE ")"},
    {"json-pointer", POINTER},
    {"relative-json-pointer", "(?:0|[1-9][0-9]*)(?:#|" POINTER ")"},
};

enum format_use format_find(const char *name, const char **pattern) {
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        if (strcmp(formats[i].name, name) != 0) continue;
        *pattern = formats[i].pattern;
        return strcmp(name, "email") == 0 ? FORMAT_EMAIL : FORMAT_PATTERN;
    }
    return FORMAT_UNKNOWN;
}
