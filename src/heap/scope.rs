//! Scopes: what a thread allocates while a guard lives goes to one tier. Uses `placement`, and
//! `thread_cache` for the thread's destructor.

use super::placement::{Begun, Tier, begin_scope, end_scope};
use super::thread_cache::register_exit;
use std::marker::PhantomData;

/// Sends the allocations that this thread makes through [`FarHeap`](crate::FarHeap) to
/// one tier until it is dropped. Scopes nest; guards are to be dropped in
/// reverse order, as variables of nested blocks are. To drop an outer one first ends all scopes of the thread, and
/// panics: the fields of a structure are dropped in their order, and so may two tasks of one thread that each hold a
/// scope across an `.await`.
///
/// A scope is stronger than the size threshold and weaker than the handles [`Far`](crate::Far)
/// and [`Local`](crate::Local). It also catches what a library allocates on first use, such as
/// the buffer of the standard output. While no far heap is running, everything is local.
///
/// It also catches the buffers of `std::fs::read` and its like: where the kernel's own faults are
/// not served they fail with `EFAULT` as the handle [`Far`](crate::Far) explains, so leave them out
/// of a far scope there, or in a local scope within it.
///
/// # Examples
/// ```
/// use farheap::{Scope, Tier};
/// let cold = {
///     let _scope = Scope::enter(Tier::FAR);
///     vec![0_u64; 1024]
/// };
/// assert_eq!(cold.len(), 1024);
/// ```
#[derive(Debug)]
#[must_use = "the scope ends when this is dropped"]
pub struct Scope {
    begun: Begun,
    /// Scopes belong to their thread.
    not_send: PhantomData<*const ()>,
}

impl Scope {
    /// Begins a scope inside of those that the thread is in.
    pub fn enter(tier: Tier) -> Scope {
        // Not inside an allocator: the best moment to register the destructor. Compilers before
        // 1.93 abort when an allocator registers one while the list of them grows.
        register_exit();
        Scope { begun: begin_scope(tier), not_send: PhantomData }
    }

    /// Leaves the scope in force until the thread ends.
    ///
    /// A scope concerns its own thread only: what it hands to other threads is allocated by their
    /// rules. This gives the threads of a pool one each, where they start.
    ///
    /// # Examples
    /// ```
    /// use farheap::{Scope, Tier};
    /// use rayon::prelude::*;
    ///
    /// let pool = rayon::ThreadPoolBuilder::new()
    ///     .num_threads(2)
    ///     .start_handler(|_| Scope::enter(Tier::FAR).keep())
    ///     .build()
    ///     .expect("threads");
    /// // What the workers allocate is far, once a heap runs.
    /// let rows: Vec<String> = pool.install(|| (0..1000).into_par_iter().map(|n| n.to_string()).collect());
    /// assert_eq!(rows[999], "999");
    /// ```
    /// With tokio: `runtime::Builder::on_thread_start(|| Scope::enter(Tier::FAR).keep())`. A guard
    /// must not live across an `.await`, after which the task may be on another thread; it is not
    /// [`Send`], so that a task which holds one cannot be spawned.
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        // A panic during a panic would end the process.
        assert!(
            end_scope(&self.begun) || std::thread::panicking(),
            "a scope was dropped before one that was begun inside of it: drop scopes in reverse order"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::placement::{pin, pin_thread_local, placement};
    use super::*;
    use crate::base::testing::ExpectedPanic;

    #[test]
    fn scopes_nest_and_restore_the_outer_placement() {
        assert_eq!(placement(), None);
        let outer = Scope::enter(Tier::FAR);
        assert_eq!(placement(), Some(Tier::FAR));
        {
            let _inner = Scope::enter(Tier::LOCAL);
            assert_eq!(placement(), Some(Tier::LOCAL));
        }
        assert_eq!(placement(), Some(Tier::FAR));
        drop(outer);
        assert_eq!(placement(), None);
    }

    #[test]
    fn a_scope_that_is_dropped_before_an_inner_one_panics_and_ends_all() {
        let _expected = ExpectedPanic::saying("drop scopes in reverse order");
        let [first, second, third] = [Tier::LOCAL, Tier::FAR, Tier::FAR].map(Scope::enter);
        let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(second)));
        dropped.expect_err("the third one lives");
        assert_eq!(placement(), None);
        drop(third); // It has ended.
        drop(first);
        assert_eq!(placement(), None);
        let later = Scope::enter(Tier::FAR);
        assert_eq!(placement(), Some(Tier::FAR));
        drop(later);
        assert_eq!(placement(), None);
    }

    #[test]
    fn a_scope_that_is_dropped_out_of_order_while_the_thread_panics_does_not_end_the_process() {
        let _expected = ExpectedPanic::saying("a failure");
        let dropped = std::panic::catch_unwind(|| {
            let _fields = (Scope::enter(Tier::LOCAL), Scope::enter(Tier::FAR)); // Dropped in their order.
            panic!("a failure");
        });
        dropped.expect_err("it panics");
        assert_eq!(placement(), None);
    }

    #[test]
    fn a_pin_is_stronger_than_a_scope() {
        let _far = Scope::enter(Tier::FAR);
        {
            let _pin = pin();
            let _inner = Scope::enter(Tier::FAR);
            assert_eq!(placement(), Some(Tier::LOCAL));
        }
        assert_eq!(placement(), Some(Tier::FAR));
    }

    #[test]
    fn a_kept_scope_lasts_as_long_as_its_thread() {
        std::thread::spawn(|| {
            Scope::enter(Tier::FAR).keep();
            drop(Scope::enter(Tier::LOCAL));
            assert_eq!(placement(), Some(Tier::FAR));
        })
        .join()
        .expect("the thread asserts nothing false");
        assert_eq!(placement(), None);
    }

    #[test]
    fn a_thread_pinned_for_life_stays_local() {
        std::thread::spawn(|| {
            pin_thread_local();
            let _far = Scope::enter(Tier::FAR);
            assert_eq!(placement(), Some(Tier::LOCAL));
        })
        .join()
        .expect("the thread asserts nothing false");
    }
}
