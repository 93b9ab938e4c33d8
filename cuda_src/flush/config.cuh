// Constants of the flush's pipelines, which follow from the -D constants: roles of warps, stages, and blocks of a
// multiprocessor.
#pragma once
#include "flush/fragments.cuh"
#include "slot/ring.cuh"

#define RAW_KEYS (ACT == BF16 && !CHANNEL_DECAYS)  // keys are operands as stored: no transform warps
#define SKETCHES (SKETCHED_HEADS > 0 && MAP != SUBSPACE)
// Sketches of the map subspace: by the fold warps, from their registers, or by encode.cu.
#define ENCODES (SKETCHED_HEADS > 0 && MAP == SUBSPACE && RAW_KEYS)

static_assert(RANK_MAX <= MAX_RANK && MAX_RANK == 16, "U has at most two operands of 8 columns");

constexpr int TOKEN_BLOCKS = (W + 15) / 16, WP = 16 * TOKEN_BLOCKS;  // the window in operand fragments
constexpr int TRANSFORM_THREADS = 256;  // threads of all transform warps: at most two per channel
static_assert(!CHANNEL_DECAYS || 2 * K <= TRANSFORM_THREADS, "two transform threads have each channel's decays");

// Warps that sketch form groups of GROUP_WARPS. With RAW_KEYS the fold warps sketch, each its own row block. Otherwise
// a block has the multiprocessor to itself, and one group of extra warps (the sketch warps) sketches a state while the
// fold warps work on the next state.
constexpr int GROUP_WARPS = ROW_BLOCKS < 4                     ? ROW_BLOCKS
                            : !RAW_KEYS || ROW_BLOCKS % 4 == 0 ? 4
                            : ROW_BLOCKS % 3 == 0              ? 3
                                                               : ROW_BLOCKS;
constexpr int GROUP_BLOCKS = RAW_KEYS ? GROUP_WARPS : ROW_BLOCKS, SKETCH_GROUPS = ROW_BLOCKS / GROUP_BLOCKS;
constexpr int OWN_STEPS = (STEPS + GROUP_WARPS - 1) / GROUP_WARPS;          // a warp's steps along K
constexpr int OWN_BLOCKS = (GROUP_BLOCKS + GROUP_WARPS - 1) / GROUP_WARPS;  // a warp's row blocks

// Numbers of named barriers: of the transform warps, and of the first group of warps that sketch.
constexpr int TRANSFORM_BARRIER = 1, FIRST_GROUP_BARRIER = 2;

// Columns of U that S is multiplied by.
constexpr int PRODUCT_COLUMNS = MAP == DENSE ? RANK_MAX : MAP == FACTORS ? PIVOTS : 0;
// A head's basis as operands of 8 columns: two bf16 slices for float32 sketches, one otherwise.
constexpr int BASIS_SLICES = SKETCH == FP32 ? 2 : 1, BASIS_TILES = (RANK_MAX + 7) / 8, RANKS = 8 * BASIS_TILES;

// Fewer stages where long windows or large states leave little memory.
constexpr bool LITTLE_MEMORY = !RAW_KEYS && (W > 16 || V * K * static_cast<int>(sizeof(state_t)) > 96 * 1024);
constexpr int KEY_STAGES = LITTLE_MEMORY ? 1 : 2;
constexpr int PREPARED_STAGES = RAW_KEYS || LITTLE_MEMORY || MOST_SHARED < 200000 ? 1 : 2;
constexpr int OPERAND_STAGES = RAW_KEYS ? KEY_STAGES : PREPARED_STAGES;  // of the fold warps' key operands
// One stage more than prepared keys: a transform warp that has waited for operands_empty then knows that the solve
// stage is free, too.
constexpr int SOLVE_STAGES = RAW_KEYS ? 2 : PREPARED_STAGES + 1;
// With two stages of S U, the next S U is computed during the epilogue.
constexpr int SUM_STAGES = !RAW_KEYS && !LITTLE_MEMORY ? 2 : 1;
constexpr int COLUMN_STAGES = MAP == FACTORS && PIVOTS <= 4 ? SUM_STAGES : 1;  // two if no state stage is lost
// The epilogue warp stores U: U has two stages, so nobody overwrites U meanwhile; or U is stored as codes with scales.
constexpr bool EPILOGUE_STORES = COLUMN_STAGES > 1 || CODED;
// The epilogue scales U only after the warps that sketch have stored all of U. A single group needs no barrier: an
// extreme group stores U in scale_group.
constexpr bool STORED_BARRIER = SKETCH_GROUPS > 1 && !EPILOGUE_STORES;
// Epilogue warps take sketches in turn. Variants with transform warps have room for two.
constexpr int EPILOGUE_WARPS = !RAW_KEYS && (MAP == FACTORS || MAP == DENSE) ? 2 : 1;

#include "flush/memory.cuh"

// Largest shared memory of a block if `blocks` fit on one multiprocessor. STATIC_SHARED bytes of a block remain for
// static shared memory, and 1024 for the system.
constexpr int block_shared(int blocks) { return (MOST_SHARED + 1024) / blocks - 1024 - STATIC_SHARED; }
// Blocks of a multiprocessor: BLOCKS, or fewer if a block needs more memory.
constexpr int fitting_blocks(int wanted) {
    return wanted > 1 && sizeof(BlockMemoryOf<1>) > block_shared(wanted) ? fitting_blocks(wanted - 1) : wanted;
}
constexpr int RESIDENT_BLOCKS = fitting_blocks(BLOCKS);
// Two state stages if they fit, and if the block has the multiprocessor to itself or states have 16 bits. (Otherwise
// several blocks on a multiprocessor overlap even with one stage each.)
constexpr int STATE_STAGES =
    (RESIDENT_BLOCKS == 1 || STATE != FP32) && sizeof(BlockMemoryOf<2>) <= block_shared(RESIDENT_BLOCKS) ? 2 : 1;
typedef BlockMemoryOf<STATE_STAGES> BlockMemory;

// Warp numbers by role, see flush/roles.cuh. One warp is both solver and epilogue if a separate epilogue warp would
// leave every thread too few registers: with 20 warps on a multiprocessor, a thread has 96 registers.
constexpr bool SOLVER_IS_EPILOGUE = ENCODES || (RAW_KEYS && !ERASES && (ROW_BLOCKS + 2) * RESIDENT_BLOCKS > 20);
constexpr int SOLVER = ROW_BLOCKS, EPILOGUE = ROW_BLOCKS + !SOLVER_IS_EPILOGUE, PRODUCER = EPILOGUE + EPILOGUE_WARPS,
              FIRST_SKETCH_WARP = PRODUCER + 1,
              FIRST_TRANSFORM_WARP = FIRST_SKETCH_WARP + (SKETCHES ? GROUP_WARPS : 0),
              WARPS = RAW_KEYS ? PRODUCER : FIRST_TRANSFORM_WARP + TRANSFORM_THREADS / 32;
