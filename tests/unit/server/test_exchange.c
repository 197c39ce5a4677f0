/* Tests the states of exchanges in server/exchange.c. */
#include <criterion/criterion.h>
#include <signal.h>

#include "server/loop.h"

static struct exchange exchange_in(enum exchange_state state) {
    return (struct exchange){.state = state};
}

/* An answer is queued once: a second one would reach the client inside the first. */
Test(exchange, an_answer_is_not_replaced_once_it_is_queued, .signal = SIGABRT) {
    struct exchange exchange = exchange_in(EXCHANGE_READY);
    exchange_queued(&exchange);
    cr_assert_eq(exchange.state, EXCHANGE_SENDING);
    exchange_ready(&exchange);
}

/* A worker that has finished finds that the client is gone. */
Test(exchange, an_answer_does_not_bring_a_client_back) {
    struct exchange exchange = exchange_in(EXCHANGE_PREPARING);
    exchange_gone(&exchange);
    exchange_ready(&exchange);
    cr_assert_eq(exchange.state, EXCHANGE_OVER);
}

/* The engine has the exchange until it has ended the jobs. */
Test(exchange, a_client_that_leaves_waits_for_the_engine) {
    struct exchange running = exchange_in(EXCHANGE_RUNNING);
    struct exchange streaming = exchange_in(EXCHANGE_STREAMING);
    struct exchange sending = exchange_in(EXCHANGE_SENDING);
    exchange_gone(&running);
    exchange_gone(&streaming);
    exchange_gone(&sending);
    cr_assert_eq(running.state, EXCHANGE_CANCELLED);
    cr_assert_eq(streaming.state, EXCHANGE_CANCELLED);
    cr_assert_eq(sending.state, EXCHANGE_OVER);
}

/* A streamed response in the background goes on; one whose client has not read its whole answer
 * does not. */
Test(exchange, a_stream_in_the_background_needs_no_client) {
    struct exchange streamed = exchange_in(EXCHANGE_STREAMING);
    struct exchange plain = exchange_in(EXCHANGE_STREAMING);
    streamed.request.background = streamed.request.stream = plain.request.background = true;
    for (int i = 0; i < 2; i++) { /* the connection is closed, then libmicrohttpd releases it */
        exchange_gone(&streamed);
        exchange_gone(&plain);
    }
    cr_assert_eq(streamed.state, EXCHANGE_BACKGROUND);
    cr_assert_eq(plain.state, EXCHANGE_CANCELLED);
}
