//! Temporary memory: what a query needs for a while.

#![expect(unsafe_code, reason = "gives spilled memory back")]

use crate::base::error::{Error, Result};
use crate::base::sync::Ordering;
use crate::base::units::ByteCount;
use crate::limit::manager::MemoryManager;
use crate::limit::manager::report::Pressure;
use crate::limit::manager::shared::ManagerState;
use crate::limit::manager::spill::Spill;
use crate::sys::vm::{HUGE_PAGE, Huge, KERNEL_PAGE, Mapping};
use std::fmt::{self, Debug};
use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How long an allocation that could spill waits after the last bytes were reclaimed for it.
const STALL_MAX: Duration = Duration::from_millis(20);

/// Temporary memory of a query, given back when dropped.
///
/// Memory that fits is charged at once, whole; it is ordinary memory and touched at the kernel's
/// speed. Memory that has spilled is far memory: what of it is resident is charged to the far heap
/// as it is touched, and what is cold is on the device.
///
/// A forked child has neither kind; dropping a copy of the handle there does nothing.
#[must_use = "temporary memory is given back when this is dropped"]
pub struct TemporaryMemory {
    /// As a number, so that the memory can be handed to another thread.
    addr: usize,
    len: ByteCount,
    home: Home,
    owner: Arc<ManagerState>,
}

enum Home {
    /// Unmapped when dropped; `None` only while that happens.
    Local(Option<Mapping>),
    Spilled(Arc<dyn Spill>),
}

impl MemoryManager {
    /// Sets where temporary memory goes that does not fit.
    pub(crate) fn set_spill(&self, spill: Weak<dyn Spill>) {
        *self.shared.host.spill.lock() = Some(spill);
    }

    /// Allocates `len` bytes of temporary memory, rounded up to whole 4,096 and aligned to them;
    /// contents are unspecified. Others give way for it. What does not fit even then spills to far
    /// memory, if there is some: it takes as much RAM as there is, and the device holds the rest.
    /// A system call may fail with `EFAULT` on spilled memory where the
    /// handle [`Far`](crate::Far) says so.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when it does not fit and cannot spill, naming the consumers and what they hold: at
    /// once when it can never fit, else after the [deadline](MemoryManager::set_deadline).
    /// [`Error::StoreFull`] when there is no room on the device it would spill to.
    /// [`Error::Forked`] in a child of the process that started the manager.
    pub fn allocate_temporary(&self, len: ByteCount) -> Result<TemporaryMemory> {
        let shared = &self.shared;
        if shared.is_foreign() {
            return Err(Error::Forked { what: "a memory manager" });
        }
        let bytes = len.as_usize().max(1).checked_next_multiple_of(KERNEL_PAGE);
        let len =
            ByteCount(bytes.ok_or(Error::BadRange { reason: "length overflows".into() })? as u64);
        let account = self.temporary();
        let spill = shared.host.spill.lock().as_ref().and_then(Weak::upgrade);
        let memory = if self.can_never_fit(len) {
            Err(shared.out_of_memory(account.name(), len, Duration::ZERO))
        } else if shared.try_charge_temporary(len) {
            shared.call_if_low();
            self.mapped(len).inspect_err(|_| account.uncharge(len)).map(|m| self.local(len, m))
        } else {
            self.taken_over(len, spill.as_ref().map(|_| STALL_MAX))
        };
        match (memory, spill) {
            (Ok(memory), _) => Ok(memory),
            (Err(_), Some(spill)) => self.spilled(len, spill),
            (Err(error), None) => {
                shared.fail(len);
                Err(error)
            }
        }
    }

    /// True if this exceeds what temporary memory may have even when all others give way.
    fn can_never_fit(&self, len: ByteCount) -> bool {
        let account = self.temporary();
        let exceeds = || account.used().0.saturating_add(len.0) > account.ceiling().0;
        exceeds() && {
            // A consumer that had a floor may have left.
            self.shared.apply_shares();
            exceeds()
        }
    }

    fn mapped(&self, len: ByteCount) -> Result<Mapping> {
        let (align, huge) = match len.as_usize() {
            HUGE_PAGE.. => (HUGE_PAGE, Huge::Yes),
            _ => (KERNEL_PAGE, Huge::No),
        };
        Mapping::reserve(len.as_usize(), align, huge)
    }

    /// Memory that is charged already.
    fn local(&self, len: ByteCount, mapping: Mapping) -> TemporaryMemory {
        let owner = Arc::clone(&self.shared);
        let addr = mapping.addr();
        TemporaryMemory { addr, len, home: Home::Local(Some(mapping)), owner }
    }

    /// Memory for which others give way: whole 2 MiB change hands where a consumer can do that, for
    /// the rest they are reclaimed.
    fn taken_over(&self, len: ByteCount, stall: Option<Duration>) -> Result<TemporaryMemory> {
        let (shared, account) = (&self.shared, self.temporary());
        let (mapping, given) = self.donated(len)?;
        let rest = ByteCount(len.0 - given.0);
        let is_charged = rest == ByteCount::ZERO || shared.try_charge_temporary(rest);
        if !is_charged && let Err(error) = shared.charge_slowly(account.member(), rest, stall) {
            drop(mapping);
            account.uncharge(given);
            return Err(error);
        }
        Ok(self.local(len, mapping))
    }

    /// A mapping with what others donated in it, and how many bytes that is, which are charged.
    fn donated(&self, len: ByteCount) -> Result<(Mapping, ByteCount)> {
        let (shared, account) = (&self.shared, self.temporary());
        let mapping = self.mapped(len)?;
        if len.as_usize() < HUGE_PAGE {
            return Ok((mapping, ByteCount::ZERO));
        }
        let (given, lost) = shared.gather_donations(&mapping, account.member());
        let Some(lost) = lost else { return Ok((mapping, given)) };
        // Nobody may touch that part, so the rest is no use either: all anew, without frames.
        mapping.unmap_around(lost.start, lost.len());
        account.uncharge(given);
        Ok((self.mapped(len)?, ByteCount::ZERO))
    }

    fn spilled(&self, len: ByteCount, spill: Arc<dyn Spill>) -> Result<TemporaryMemory> {
        let shared = &self.shared;
        let ptr = spill.allocate(len).inspect_err(|_| shared.fail(len))?;
        shared.counts.spilled.fetch_add(len.0, Ordering::Relaxed);
        shared.tell(Pressure::Spilled { len });
        let addr = ptr.as_ptr().expose_provenance();
        let owner = Arc::clone(shared);
        Ok(TemporaryMemory { addr, len, home: Home::Spilled(spill), owner })
    }
}

impl TemporaryMemory {
    /// First byte.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(self.addr))
            .expect("memory is never at zero")
    }

    /// Bytes, rounded up to whole 4,096.
    #[must_use]
    pub fn len(&self) -> ByteCount {
        self.len
    }

    /// True if it is memory beyond the limit.
    #[must_use]
    pub fn is_spilled(&self) -> bool {
        matches!(self.home, Home::Spilled(_))
    }
}

impl Drop for TemporaryMemory {
    fn drop(&mut self) {
        let ptr = self.as_ptr();
        if self.owner.is_foreign() {
            // The child has no such mapping; what is there now may be somebody else's.
            if let Home::Local(mapping) = &mut self.home {
                std::mem::forget(mapping.take());
            }
            return;
        }
        match &mut self.home {
            Home::Local(mapping) => {
                drop(mapping.take());
                self.owner.temporary.budget.uncharge(self.len);
            }
            Home::Spilled(spill) => {
                // SAFETY: what this memory was given, once: it ends.
                unsafe { spill.free(ptr, self.len) };
                self.owner.counts.spilled.fetch_sub(self.len.0, Ordering::Relaxed);
            }
        }
    }
}

impl Debug for TemporaryMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TemporaryMemory({:#x}, {}, spilled: {})", self.addr, self.len, self.is_spilled())
    }
}
