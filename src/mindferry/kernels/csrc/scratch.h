// Buffers that live on between calls: what one kernel call needs and throws away.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mf {

enum Slot : int {
    kNormed, kBranch, kWide, kWide2, kGradMid, kGradQkv, kQkv, kPre, kMidResidual, kPartial, kPartial2,
    kWeight, kHead, kDelta, kGradK, kGradV, kContext, kHeads, kSlots
};
enum LocalSlot : int { kTileScores, kTileGrad, kTileQ, kTileK, kTileKT, kTileV, kTileVT, kTileDO, kTileOut,
                       kTileDK, kTileDV, kTileDQ, kLocalSlots };

// At least `bytes` of 64-byte aligned memory; contents undefined. One buffer a slot for the process, to be
// used under OpLock, and one a slot and thread. Throws std::bad_alloc.
void* shared_scratch(Slot slot, size_t bytes);
void* thread_scratch(LocalSlot slot, size_t bytes);

template <class T>
T* shared(Slot slot, int64_t count) { return static_cast<T*>(shared_scratch(slot, sizeof(T) * count)); }
template <class T>
T* local(LocalSlot slot, int64_t count) { return static_cast<T*>(thread_scratch(slot, sizeof(T) * count)); }

// Give the process-wide buffers back to the system.
void release_scratch();

}  // namespace mf
