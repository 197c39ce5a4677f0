/* Chats for the fit: what their pictures may take, and turns that a template refuses. */
#include <criterion/criterion.h>
#include <string.h>

#include "base/mem.h"
#include "daemon/fit_chats.h"
#include "picture/prepare.h"

/* Stands in for the process that decodes: every file has one pixel. */
int __wrap_picture_read(const void *data, size_t size, int64_t deadline, struct picture_rgb *out,
                        struct fault *fault);
int __wrap_picture_read(const void *data, size_t size, int64_t deadline, struct picture_rgb *out,
                        struct fault *fault) {
    (void)data, (void)size, (void)deadline, (void)fault;
    *out = (struct picture_rgb){1, 1, mem_must_alloc(1, 3)};
    return 0;
}

static const struct fit_form square = {.pictures = {
                                           .kind = PICTURE_STRETCHED,
                                           .filter = PICTURE_BILINEAR,
                                           .token_edge = 16,
                                           .tile_tokens_max = 16,
                                           .tile_edge = 64,
                                           .rescale = 1.0 / 255,
                                           .deviation = {1, 1, 1},
                                       }};
static const int64_t square_bytes = 3 * 64 * 64;

#define CHAT                                                                                       \
    "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image_url\", "                \
    "\"image_url\": {\"url\": \"data:image/png;base64,AAAA\"}}]}]}\n"

static int read_two_chats(struct fit_chats *chats, struct fault *fault) {
    return fit_read_chats(CHAT CHAT, strlen(CHAT CHAT), &square, chats, fault);
}

Test(fit_chats, pictures_of_all_chats_share_one_bound) {
    struct fit_chats chats;
    struct fault fault = {0};
    atomic_store(&prepared_bytes, PICTURE_MEMORY_MAX - 2 * square_bytes);
    cr_assert_eq(read_two_chats(&chats, &fault), 0, "%s", fault.text);
    cr_expect_eq(chats.picture_count, 2);
    cr_expect_eq(atomic_load(&prepared_bytes), PICTURE_MEMORY_MAX);
    fit_chats_close(&chats);
    atomic_fetch_add(&prepared_bytes, 1);
    cr_expect_eq(read_two_chats(&chats, &fault), ERR_BUSY);
    cr_expect(strstr(fault.text, "line 2: ") && strstr(fault.text, "may take 1024 MiB"), "%s",
              fault.text);
    cr_expect_eq(chats.picture_count, 0);
    cr_expect_eq(atomic_load(&prepared_bytes), PICTURE_MEMORY_MAX - 2 * square_bytes + 1);
    atomic_store(&prepared_bytes, 0);
}

/* As the server does. */
Test(fit_chats, messages_become_the_turns_that_the_template_takes) {
    static const char chat[] = "{\"messages\":[{\"role\":\"system\",\"content\":\"Be brief.\"},"
                               "{\"role\":\"user\",\"content\":\"hi\"}]}\n";
    static const char template[] =
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns must alternate') }}{% endif %}{{ m.content }}{% endfor %}";
    const struct fit_form form = {.turns = oai_turns_of(template)}, plain = {.turns = {0}};
    struct fit_chats chats;
    struct fault fault = {0};
    cr_assert_eq(fit_read_chats(chat, strlen(chat), &form, &chats, &fault), 0, "%s", fault.text);
    cr_expect(strstr(chats.lines.data, "[{\"role\":\"user\",\"content\":\"Be brief.\\n\\nhi\"}]"),
              "%s", chats.lines.data);
    fit_chats_close(&chats);
    cr_assert_eq(fit_read_chats(chat, strlen(chat), &plain, &chats, &fault), 0, "%s", fault.text);
    cr_expect(strstr(chats.lines.data, "{\"role\":\"system\",\"content\":\"Be brief.\"}"), "%s",
              chats.lines.data);
    fit_chats_close(&chats);
}
