/* Declarations shared by the files of the keeper: keeper.c (slots, pages, which conversations
 * stay), keeper_save.c (files that are written) and keeper_restore.c (files that are read). No
 * other file includes this. */
#ifndef KEEPD_ENGINE_KEPT_KEEPER_INT_H
#define KEEPD_ENGINE_KEPT_KEEPER_INT_H

#include "engine/kept/keeper.h"

/* Returns how many blocks a copy of a conversation has. */
static inline int keeper_block_count(const struct keeper *keeper) {
    return 1 + (int)keeper_streams(keeper) + keeper->options.shape.states;
}

/* Notes that the head may be tried again, whatever the others wait for. */
static inline void keeper_note_head_change(struct keeper *keeper) {
    keeper->head_changes++;
}

/* ---- keeper_save.c ---- */

/* Returns the id that a conversation has by its content; 0: it has none, because it is never
 * written. */
uint64_t keeper_name(const struct keeper *keeper, const struct conversation *conv);
/* Returns whether the conversation may be removed. If it must be written before, begins to write
 * it, at once or when the store can. */
bool keeper_save_first(struct keeper *keeper, struct conversation *conv);
/* Ends the copies of a conversation that is about to be removed. */
void keeper_cancel_copies(struct keeper *keeper, const struct conversation *conv);
/* Counts and logs a conversation that left memory and could not be written to its file. */
void keeper_count_lost(struct keeper *keeper, uint64_t id);

/* ---- keeper_restore.c ---- */

/* Copies blocks into the cache until `most` bytes are copied. After the last block the conversation
 * is like any other, and the file stays as its copy. */
void keeper_continue_import(struct keeper *keeper, size_t most);
void keeper_end_import(struct keeper *keeper); /* does nothing without one */
/* Ends waits for a file that was read, or for a directory that was listed, so that the requests are
 * tried again. */
void keeper_end_waits(struct keeper *keeper, int64_t now_ns);

#endif
