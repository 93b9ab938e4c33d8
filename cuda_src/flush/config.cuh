// Constants of the flush's pipelines, which follow from the -D constants: roles of warps, stages, and blocks of a
// multiprocessor.
#pragma once
#include "flush/fragments.cuh"
#include "slot/ring.cuh"

#define SKETCHES (SKETCHED_HEADS > 0 && MAP != SUBSPACE)  // encode.cu sketches for the map subspace

constexpr bool RAW_KEYS = ACT == BF16 && !CHANNEL_DECAYS;   // keys are operands as stored: no transform warps
constexpr bool HIGH_RANKS = MAP == DENSE && RANK_MAX > 16;  // dense maps by a team of warps (map/blocks.cuh)

constexpr int TOKEN_BLOCKS = (W + 15) / 16, WP = 16 * TOKEN_BLOCKS;  // the window in operand fragments
constexpr int TRANSFORM_THREADS = 256;  // threads of all transform warps: at most two per channel

// Warps that sketch form groups of GROUP_WARPS. With FOLD_WARPS_SKETCH the fold warps sketch, each its own row block.
// Otherwise a block has the multiprocessor to itself, and one group of extra warps (the sketch warps) sketches a state
// while the fold warps work on the next state. With raw keys there are sketch warps if V = 128 and the sketch's
// workspace leaves no room for a second block.
constexpr bool FOLD_WARPS_SKETCH =
    RAW_KEYS && !(HIGH_RANKS && ROW_BLOCKS == 8 && RANK_MAX > 21 && SKETCH == BF16 && STATE == FP32);
// With high ranks all fold warps are one group, because a group's sums take as much memory as the map.
constexpr int GROUP_WARPS = !RAW_KEYS               ? 4
                            : HIGH_RANKS            ? ROW_BLOCKS
                            : ROW_BLOCKS % 4 == 0   ? 4
                            : ROW_BLOCKS % 3 == 0   ? 3
                                                    : ROW_BLOCKS;
static_assert(FOLD_WARPS_SKETCH || GROUP_WARPS <= ROW_BLOCKS,
              "each sketch warp waits for the row blocks that it makes U of");
constexpr int GROUP_BLOCKS = FOLD_WARPS_SKETCH ? GROUP_WARPS : ROW_BLOCKS, SKETCH_GROUPS = ROW_BLOCKS / GROUP_BLOCKS;
constexpr int OWN_STEPS = (STEPS + GROUP_WARPS - 1) / GROUP_WARPS;          // a warp's steps along K
constexpr int OWN_BLOCKS = (GROUP_BLOCKS + GROUP_WARPS - 1) / GROUP_WARPS;  // a warp's row blocks

// Numbers of named barriers: of the transform warps, and of the first group of warps that sketch.
constexpr int TRANSFORM_BARRIER = 1, FIRST_GROUP_BARRIER = 2;

// Columns of U that S is multiplied by.
constexpr int PRODUCT_COLUMNS = MAP == DENSE ? RANK_MAX : MAP == FACTORS ? PIVOTS : 0;
// A head's basis as operands of 8 columns: two bf16 slices for float32 sketches, one otherwise.
constexpr int BASIS_SLICES = SKETCH == FP32 ? 2 : 1, BASIS_TILES = (RANK_MAX + 7) / 8, RANKS = 8 * BASIS_TILES;
// SLICED: shared memory has U as two bf16 slices, in the order of left operands (flushes with high ranks and bf16
// sketches). Gram matrix and S U use the same slices, so the map is exact for a U with an error of 2^-17, which is less
// than the error of U in a bf16 sketch.
constexpr bool SLICED = HIGH_RANKS && !CODED && BASIS_SLICES == 1;

// Stages that do not depend on the size of shared memory. High ranks leave room for a second state stage only if keys
// have one stage.
constexpr bool ONE_KEY_STAGE = !RAW_KEYS && (W > 16 || (HIGH_RANKS && RANK_MAX > (SKETCH == BF16 ? 17 : 20)));
constexpr int KEY_STAGES = ONE_KEY_STAGE ? 1 : 2;
constexpr int PREPARED_STAGES = RAW_KEYS || ONE_KEY_STAGE || MOST_SHARED < 200000 ? 1 : 2;
constexpr int OPERAND_STAGES = RAW_KEYS ? KEY_STAGES : PREPARED_STAGES;  // of the fold warps' key operands
// One stage more than prepared keys: a transform warp that has waited for operands_empty then knows that the solve
// stage is free, too.
constexpr int SOLVE_STAGES = RAW_KEYS ? 2 : PREPARED_STAGES + 1;
// Two if sketch warps let the fold warps go on to the next tile at once, and shared memory has room.
constexpr int VALUE_STAGES = RAW_KEYS && !FOLD_WARPS_SKETCH && W <= 16 && RANK_MAX <= 40 ? 2 : 1;
// With two stages of S U, the next S U is computed during the epilogue.
constexpr int SMALL_SUM_STAGES = MAP != SHARED && !RAW_KEYS && WP == 16 && RANK_MAX <= 16 ? 2 : 1;
constexpr int COLUMN_STAGES = MAP == FACTORS && PIVOTS <= 4 ? SMALL_SUM_STAGES : 1;  // two if no state stage is lost
// The epilogue warp stores U: U has two stages, so nobody overwrites U meanwhile; or U is stored as codes with scales.
constexpr bool EPILOGUE_STORES = COLUMN_STAGES > 1 || CODED;
// The epilogue scales U only after the warps that sketch have stored all of U. A single group needs no barrier: an
// extreme group stores U in scale_group.
constexpr bool STORED_BARRIER = SKETCH_GROUPS > 1 && !EPILOGUE_STORES && PRODUCT_COLUMNS > 0;

// Teams of epilogue warps take sketches in turn. Variants with transform warps have room for two epilogue warps. With
// high ranks there is one team, whose warps share each sketch's map: another team would need more shared memory.
constexpr int EPILOGUE_TEAMS = !RAW_KEYS && (MAP == FACTORS || (MAP == DENSE && !HIGH_RANKS)) ? 2 : 1;

// The rest depends on the size of a block's memory.
#include "flush/memory.cuh"

// Largest shared memory of a block if `blocks` fit on one multiprocessor. STATIC_SHARED bytes of a block remain for
// static shared memory, and 1024 for the system.
constexpr int block_shared(int blocks) { return (MOST_SHARED + 1024) / blocks - 1024 - STATIC_SHARED; }
template <int STATES, int SUMS> constexpr bool fits(int blocks) {
    return sizeof(BlockMemoryOf<STATES, SUMS>) <= block_shared(blocks);
}
// Blocks on a multiprocessor, and warps of a team that finishes a sketch (EPILOGUE_TEAM). Without high ranks there are
// MIN_BLOCKS blocks, and teams of one warp. With high ranks a block has more warps and needs more shared memory:
//
//   keys         V            blocks                             warps of a team
//                                                                up to rank 21  beyond
//   raw          64, 80, 96   two if they fit, otherwise one     3              4
//   raw          128          two if they fit, up to rank 24 *   1 **           1 **
//   raw          128          otherwise one                      3              4
//   transformed  any          one                                2              4
//
//   *  rank 21 for bf16 sketches of float32 states (FOLD_WARPS_SKETCH)
//   ** with more than 20 warps on the multiprocessor, fold warps would have too few registers
constexpr int WANTED_BLOCKS = !FOLD_WARPS_SKETCH                  ? 1
                              : !HIGH_RANKS || MIN_BLOCKS < 2     ? MIN_BLOCKS
                              : ROW_BLOCKS == 8 && RANK_MAX > 24 ? 1
                                                                  : 2;
constexpr int BLOCKS = HIGH_RANKS && !fits<1, SMALL_SUM_STAGES>(WANTED_BLOCKS) ? 1 : WANTED_BLOCKS;
// Two state stages if they fit, and if the block has the multiprocessor to itself, or states have 16 bits, or ranks are
// high. (Otherwise several blocks on a multiprocessor overlap even with one stage each.)
constexpr int STATE_STAGES = (BLOCKS == 1 || STATE != FP32 || HIGH_RANKS) && fits<2, SMALL_SUM_STAGES>(BLOCKS) ? 2 : 1;
// With high ranks S U has two stages if the second stage costs neither a block of the multiprocessor nor a state stage.
constexpr int SUM_STAGES = SLICED && RAW_KEYS && fits<STATE_STAGES, 2>(BLOCKS) ? 2 : SMALL_SUM_STAGES;

typedef BlockMemoryOf<STATE_STAGES, SUM_STAGES> BlockMemory;
typedef SumsOf<SUM_STAGES> Sums;
typedef SketchMemoryOf<SUM_STAGES> SketchMemory;
typedef SketchBarriersOf<SUM_STAGES> SketchBarriers;

constexpr int EPILOGUE_TEAM = !HIGH_RANKS || (BLOCKS > 1 && ROW_BLOCKS == 8) ? 1
                              : RANK_MAX > 21                                 ? 4
                              : RAW_KEYS                                      ? 3
                                                                              : 2;
constexpr int EPILOGUE_WARPS = EPILOGUE_TEAMS * EPILOGUE_TEAM;
// Warp numbers by role, see flush/roles.cuh. One warp is both solver and epilogue if a separate epilogue warp would
// leave every thread too few registers: with 20 warps on a multiprocessor, a thread has 96 registers.
constexpr bool SOLVER_IS_EPILOGUE = RAW_KEYS && !ERASES && !HIGH_RANKS && (ROW_BLOCKS + 2) * MIN_BLOCKS > 20;
constexpr int SOLVER = ROW_BLOCKS, EPILOGUE = ROW_BLOCKS + !SOLVER_IS_EPILOGUE, PRODUCER = EPILOGUE + EPILOGUE_WARPS,
              FIRST_SKETCH_WARP = PRODUCER + 1,
              FIRST_TRANSFORM_WARP = FIRST_SKETCH_WARP + (SKETCHES ? GROUP_WARPS : 0),
              WARPS = FOLD_WARPS_SKETCH ? PRODUCER
                                        : FIRST_TRANSFORM_WARP + (RAW_KEYS ? 0 : TRANSFORM_THREADS / 32);
