/* tools/check_circles must refuse the circle of these five files. */
void a_call(void);
void b_call(void);

void a_call(void) {
    b_call();
}
