//! `fork(2)`: a child has the far memory of its parent as it was at the fork.
//!
//! ```text
//!  parent's thread          region's threads            child
//!  ---------------          ----------------            -----
//!  before: close gate ----> stand still
//!   hold the slots in use, a pipe, let the mappings be inherited
//!  fork ------------------------------------------->   after: a thread of its own (child), which
//!  after: open gate ------> go on                       registers the memory and serves its faults
//!   slots of the hold are                               reads the parent's slots
//!   not written, not freed                              writes to slots of its own
//!   pages shared are copied
//!   before they move out
//!      ...                  evictor: the pipe is
//!                           closed, the hold ends <---  exits, is killed, or calls exec
//! ```
//! The C library calls what is here around `fork` only (`pthread_atfork(3)`), not around `clone(2)`: what
//! is not told of a fork has no far memory, and dies of a touch.
//!
//! | module | does |
//! |---|---|
//! | this one | what happens around a fork, in its order |
//! | `state`, `children` | what a parent keeps for the children that live |
//! | `child_region`, `snapshot`, `entry` | what a child has inherited |
//! | `child_thread` | serves its faults, and takes pages out |
//!
//! Not inherited is a region in in-thread mode, one that has jemalloc's metadata, one whose store cannot be read in a
//! child (encrypted, or of the program's own without [`Store::inherit`](crate::store::Store::inherit)) or is wiped at
//! the end, and all regions where the kernel lacks MOVE or PAGEMAP_SCAN: these are kept from the child by an advice
//! before each fork, and stay reserved there, without access.
//!
//! # Invariants
//! 1. Locks are taken in this order: the list of parts, gates, that of what is mapped anew, then none that a thread may hold which
//!    stands still.
//! 2. The range of a region is inherited between `before` and `after` only.
#![expect(unsafe_code, reason = "passes what is under way from one function of a fork to the next")]

mod child_region;
mod child_thread;
pub(in crate::paging) mod children;
mod entry;
mod snapshot;
pub(in crate::paging) mod state;

use crate::base::error::{Error, Result};
use crate::base::gate::{Closed, Gate};
use crate::base::local::keep_local;
use crate::base::sync::{AtomicPtr, Ordering};
use crate::paging::diagnostics;
use crate::paging::fork::child_region::ChildRegion;
use crate::paging::fork::children::Birth;
use crate::paging::fork::snapshot::ForkSnapshot;
use crate::paging::pager::Pager;
use crate::paging::pager::frame_pool::FramePool;
use crate::sys::map_anew::NothingAnew;
use crate::sys::{fork, messages, thread, vm};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

const CANNOT_USE: &str = "a forked child cannot use far memory; touching it is SIGSEGV";
const INHERITED: &str = "inherited far memory";

/// A child's inheritance from this process, and the rest that it must not have.
#[derive(Debug)]
enum Part {
    /// A region that this process made.
    Region(Arc<Pager>),
    /// One that children have no part in.
    Kept(Arc<Pager>),
    /// One that it has inherited itself.
    Child(Arc<ChildRegion>),
}

static PARTS: Mutex<Vec<Part>> = Mutex::new(Vec::new());

/// A fork that has begun.
struct BegunFork {
    parts: MutexGuard<'static, Vec<Part>>,
    _nothing_anew: Option<NothingAnew>,
    /// For each part; `None`: the child will have no access to it.
    births: Vec<Option<Birth>>,
}

/// The fork that is under way, of which there is one at a time: it holds the list.
static UNDER_WAY: AtomicPtr<BegunFork> = AtomicPtr::new(ptr::null_mut());

fn parts() -> MutexGuard<'static, Vec<Part>> {
    PARTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on forks are noticed. What other libraries have registered by now runs before this where
/// it comes before a fork, and after it where it comes after one: it may use far memory then.
pub(in crate::paging) fn watch() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // First, because `in_child` starts a thread.
        thread::forget_own_in_children();
        fork::around_forks(before, in_parent, in_child);
    });
}

/// A region's memory is inherited from now on, or kept from children, as its mode and its store allow.
pub(in crate::paging) fn list(pager: &Arc<Pager>) {
    watch();
    let part = if pager.fork().inherited().is_some() { Part::Region } else { Part::Kept };
    let mut parts = parts();
    parts.push(part(Arc::clone(pager)));
    if pager.fork().inherited().is_some() {
        fork::reserve_numbers();
    }
}

/// A region ends.
pub(in crate::paging) fn unlist(pager: &Arc<Pager>) {
    let mut parts = parts();
    parts.retain(|part| match part {
        Part::Region(listed) | Part::Kept(listed) => !Arc::ptr_eq(listed, pager),
        Part::Child(_) => true,
    });
    if parts.is_empty() {
        fork::release_numbers();
    }
}

extern "C" fn before() {
    let _ours = keep_local();
    let parts = parts();
    let thread = thread::current();
    let any_inherited = parts.iter().any(|part| !matches!(part, Part::Kept(_)));
    if any_inherited {
        // While there is somebody to make room ...
        fork::touch_streams();
    }
    // The evictor first: from then on nothing leaves, and the handlers can still bring in what is touched.
    parts.iter().for_each(|part| part.close(Closed::Evictor, thread));
    if any_inherited {
        // ... and again: now they stay in memory until the fork.
        fork::touch_streams();
    }
    parts.iter().for_each(|part| part.close(Closed::All, thread));
    let nothing_anew = any_inherited.then(NothingAnew::begin); // Else handlers go on.
    let births = parts.iter().map(Part::prepare).collect();
    let under_way = Box::new(BegunFork { parts, _nothing_anew: nothing_anew, births });
    UNDER_WAY.store(Box::into_raw(under_way), Ordering::Relaxed);
}

/// A fork that [`before`] has begun, in either process.
fn under_way() -> BegunFork {
    let under_way = UNDER_WAY.swap(ptr::null_mut(), Ordering::Relaxed);
    assert!(!under_way.is_null(), "a fork ends that has begun");
    // SAFETY: made by `before` of this thread's fork, and taken once in each process.
    *unsafe { Box::from_raw(under_way) }
}

extern "C" fn in_parent() {
    let _ours = keep_local();
    let BegunFork { parts, _nothing_anew, births } = under_way();
    let any_inherited = births.iter().any(Option::is_some);
    parts.iter().zip(births).for_each(|(part, birth)| part.go_on(birth));
    if any_inherited {
        fork::reserve_numbers();
    }
}

extern "C" fn in_child() {
    let _ours = keep_local();
    // What it opens here and by its thread it closes when it ends, or the program does by closing all.
    let _raised = fork::RaisedLimit::new();
    let BegunFork { mut parts, _nothing_anew, births } = under_way();
    let mut children = Vec::with_capacity(parts.len());
    for (part, birth) in parts.iter().zip(births) {
        // Not inherited: the range is reserved (`fork::keep_place`).
        let Some(birth) = birth else { continue };
        match part.inherit(birth) {
            Ok(child) => children.push(Part::Child(child)),
            Err(error) => {
                let table = part.pager().table();
                if !fork::take_away(table.start(), table.len()) {
                    diagnostics::fatal("far memory could not be taken away from a child", &error);
                }
                diagnostics::warn(CANNOT_USE, &error);
            }
        }
    }
    messages::flush();
    fork::note_inherited(children.iter().map(|part| part.pager().table().start()));
    // The regions have threads and mappings that are not in this process: they are not to be dropped.
    std::mem::forget(std::mem::replace(&mut *parts, children));
}

impl Part {
    fn pager(&self) -> &Arc<Pager> {
        match self {
            Part::Region(pager) | Part::Kept(pager) => pager,
            Part::Child(child) => child.pager(),
        }
    }

    fn gate(&self) -> &Gate {
        match self {
            Part::Region(pager) | Part::Kept(pager) => pager.fork().gate(),
            Part::Child(child) => child.gate(),
        }
    }

    fn open(&self) {
        match self {
            Part::Region(pager) => {
                pager.fork().gate().open(|| {
                    call_evictor(pager.pool());
                    pager.sched().call_all();
                });
            }
            Part::Kept(_) => {}
            Part::Child(child) => {
                child.gate().open(|| child.ring());
            }
        }
    }

    fn close(&self, what: Closed, thread: u32) {
        match self {
            Part::Region(pager) if what == Closed::Evictor => {
                pager.fork().gate().close(what, thread, 1, || call_evictor(pager.pool()));
            }
            Part::Region(pager) => {
                let all = pager.sched().handlers() as u32 + 1;
                pager.fork().gate().close(what, thread, all, || pager.sched().call_all());
            }
            Part::Kept(_) => {}
            Part::Child(child) => child.close(what, thread),
        }
    }

    /// Prepares for a child. `None`: it will have no access.
    fn prepare(&self) -> Option<Birth> {
        let birth = match self {
            Part::Region(pager) => {
                let maps = pager.slots().map();
                // 64 children at most hold slots: one that has just ended makes room for this one.
                pager.fork().children().reap_now(maps);
                let table = pager.table();
                Birth::prepare(maps, pager.mapper().far_parts(table.start(), table.len()))
            }
            Part::Kept(pager) => {
                keep_from_child(pager);
                return None;
            }
            Part::Child(child) => child.prepare_birth(),
        };
        let birth = birth.and_then(|birth| self.set_inherited(true).map(|()| birth));
        if let Err(error) = &birth {
            diagnostics::warn(CANNOT_USE, error);
            drop(self.set_inherited(false));
        }
        birth.ok()
    }

    fn set_inherited(&self, inherited: bool) -> Result<()> {
        let pager = self.pager();
        pager.table().set_inherited(inherited)?;
        pager.frames().set_inherited(inherited)
    }

    /// The process has forked, or failed to: goes on.
    fn go_on(&self, birth: Option<Birth>) {
        if matches!(self, Part::Kept(_)) {
            return; // Nothing was stopped.
        }
        if let Err(error) = self.set_inherited(false) {
            diagnostics::warn("far memory stays visible to raw clones", &error);
        }
        match self {
            Part::Region(pager) => {
                pager.mapper().note_fork();
                birth.into_iter().for_each(|birth| pager.fork().children().add(birth));
            }
            Part::Kept(_) => unreachable!("looked at above"),
            Part::Child(child) => {
                birth.into_iter().for_each(|birth| child.children().add(birth));
            }
        }
        self.open();
    }

    /// In the child: makes the memory its own.
    fn inherit(&self, birth: Birth) -> Result<Arc<ChildRegion>> {
        if self.gate().is_broken() {
            return Err(Error::Unsupported {
                feature: INHERITED,
                why: "a function that runs before a fork (pthread_atfork) touched far memory",
            });
        }
        // From now on as in the parent.
        self.set_inherited(false)?;
        let snapshot = match self {
            Part::Region(pager) => {
                ForkSnapshot::of_region(Arc::clone(pager), pager.fork().children().count())?
            }
            Part::Kept(_) => unreachable!("such a part has no birth"),
            Part::Child(child) => child.snapshot(),
        };
        child_thread::start(snapshot, birth)
    }
}

/// Excludes a region from the next child, even after `MADV_DOFORK`: what a child inherits without a thread that serves it
/// reads as zero. One call of the kernel's, and one that asks, unless the region is several of its mappings: what the
/// program has mapped over is inherited.
fn keep_from_child(pager: &Pager) {
    if let Some(why) = pager.fork().why_not() {
        diagnostics::warn(CANNOT_USE, &Error::Unsupported { feature: INHERITED, why });
    }
    let table = pager.table();
    let far = pager.mapper().far_parts(table.start(), table.len());
    if let Err(error) = far.each(vm::keep_from_children) {
        diagnostics::warn("a forked child may read zeros in far memory", &error);
    }
}

fn call_evictor(pool: &FramePool) {
    pool.waiters().evictor_waker().wake_again();
}
