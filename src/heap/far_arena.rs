//! One arena of a far tier: jemalloc's arena, and the hooks that serve its data and its metadata.
//!
//! Uses `jemalloc`, `hooks`; owned by `far_arenas`.
//!
//! # Metadata
//! Jemalloc's metadata of an arena (extents, slabs, locks) is local memory, or far memory of the tier
//! itself ([`FarArenasOptions::metadata_is_far`]). Far, it is brought in when an allocation needs it,
//! with jemalloc's locks held: allocations wait for the device then. Children of a fork do not inherit such a tier.

#![expect(unsafe_code, reason = "creates and destroys arenas")]

use super::accounting::Usage;
use super::far_options::FarArenasOptions;
use super::hooks::{ExtentSource, Hooks};
use super::jemalloc::{self, JemallocArena};
use crate::base::error::Result;
use crate::base::units::ByteCount;
use std::sync::Arc;

/// Bounds of the address range that an arena asks for at once, in bytes.
const GROW_MAX: usize = 64 << 20;
const GROW_MIN: usize = 2 << 20;

/// See the module's documentation.
pub(super) struct FarArena {
    arena: JemallocArena,
    hooks: Box<Hooks>,
    /// Source of its metadata; `None`: that is local.
    metadata: Option<Box<Hooks>>,
}

impl FarArena {
    /// Creates an arena over `source`.
    ///
    /// # Errors
    /// [`Error::Jemalloc`](crate::Error::Jemalloc).
    ///
    /// # Safety
    /// `source` outlives the arena.
    pub(super) unsafe fn create(
        source: &Arc<dyn ExtentSource>,
        options: &FarArenasOptions,
    ) -> Result<FarArena> {
        // SAFETY: as the caller promises.
        let hooks = Box::new(unsafe { Hooks::of_data(source) });
        let of_metadata = || {
            // SAFETY: as the caller promises.
            Box::new(unsafe { Hooks::of_metadata(source) })
        };
        let metadata = options.metadata_is_far.then(of_metadata);
        let serving = metadata.as_ref().map_or_else(jemalloc::local_metadata, |far| far.as_table());
        // SAFETY: the boxes keep their place, and live as long as the tier: for ever. On the way
        // out below the arena goes first.
        let arena = unsafe { JemallocArena::create(hooks.as_table(), serving) }?;
        let configured = configure(arena, source.span(), options);
        if let Err(error) = configured {
            // SAFETY: nothing has been allocated from the arena.
            unsafe { arena.destroy() }?;
            return Err(error);
        }
        Ok(FarArena { arena, hooks, metadata })
    }

    pub(super) fn arena(&self) -> JemallocArena {
        self.arena
    }

    /// Source of its data.
    pub(super) fn hooks(&self) -> &Hooks {
        &self.hooks
    }

    /// Bytes charged to the source, for metadata too.
    pub(super) fn committed(&self) -> u64 {
        self.hooks.committed().0 + self.metadata_committed()
    }

    fn metadata_committed(&self) -> u64 {
        self.metadata.as_ref().map_or(0, |far| far.committed().0)
    }

    /// Uses of the arena's memory, as of jemalloc's last epoch. `resident_bytes` is what of its metadata is
    /// local RAM.
    pub(super) fn memory(&self) -> Usage {
        let of_jemalloc = Usage::of_arena(self.arena);
        let is_far = self.metadata.is_some();
        let resident = if is_far { ByteCount::ZERO } else { of_jemalloc.resident_bytes };
        Usage { resident_bytes: resident, ..of_jemalloc }
    }

    /// Bytes of address space that jemalloc takes for resident memory, and that are far; as of its last
    /// epoch.
    pub(super) fn seems_resident(&self) -> u64 {
        let seems = Usage::of_arena(self.arena);
        let far_metadata = if self.metadata.is_some() { seems.resident_bytes.0 } else { 0 };
        seems.active_bytes.0 + seems.dirty_bytes.0 + far_metadata
    }

    /// Destroys the arena, so that the source gets all its ranges back.
    ///
    /// # Errors
    /// [`Error::Jemalloc`](crate::Error::Jemalloc).
    ///
    /// # Safety
    /// As for [`JemallocArena::destroy`].
    pub(super) unsafe fn destroy(&self) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.arena.destroy() }
    }
}

/// Sets what makes an arena a far one.
fn configure(arena: JemallocArena, span: usize, options: &FarArenasOptions) -> Result<()> {
    let decay_ms = isize::try_from(options.decay.as_millis()).unwrap_or(isize::MAX);
    // Nothing goes muzzy: there is no lazy purge, dirty extents are decommitted.
    arena.set_decay(decay_ms, 0)?;
    // jemalloc gives back free extents of 8 MiB at once, merged ones too; `maintain` does it here.
    arena.set_oversize_threshold(usize::MAX)?;
    arena.set_grow_limit(ByteCount(GROW_MAX.min(span / 64).max(GROW_MIN) as u64))
}
