//! A limit on the resident memory of the process: far memory gives way to what is not far.
//!
//! Stacks, local memory and what the program maps itself cannot be evicted; code can where a
//! library has said how ([`let_code_leave_by`]), and is dropped when far memory needs its room. For what stays, the maintenance thread
//! reads the process's resident memory a hundred times a second, more often while it grows, and gives
//! the far tier the rest of the limit. Threads that know beforehand what they will touch beside far
//! memory have room made for it ([`ProcessLimit::make_room`]). Uses `sys` and `region`.
//!
//! A limit that nobody has named is a share of the control group, and counts no memory of files: the kernel takes that back
//! before it ends a process. What the processes of a group have is settled without a word between them ([`GroupShare`]): each
//! takes a half of what is free, and gives up its part of what is missing; one that reads far memory asks for a little more.
//! So much flows from large processes to small ones until those that want more have as much as each other.
//! Where files that are in use are taken back, and before a fork, more is left free.
//!
//! # Invariants
//! 1. The tier has at most `limit - (resident - charged to the tier)`, and at least what it needs to
//!    work; where that exceeds the limit, a warning on standard error says so. In a share of a group this is the resident
//!    memory that is not of files.

use crate::base::deadline::Deadline;
use crate::base::error::Result;
use crate::base::sync::{AtomicU64, Ordering};
use crate::base::units::ByteCount;
use crate::paging::advise::pages_in;
use crate::paging::region::Region;

use crate::sys::messages;
use crate::sys::probe::{CgroupLimit, GroupUse, Memory};
use crate::sys::statm::Statm;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How often resident memory is read; reading takes 5 us.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The same while memory that is not far grows, near the limit.
const LOOK_SOON: Duration = Duration::from_millis(1);

/// Memory that is not far counts as its maximum of this time, up to twice as long. Far memory is charged before it is
/// there, chunks of 2 MiB at once; until the program has touched them, what is not far seems to be less than it is. So
/// before it counts as less it is asked which pages are there ([`ProcessLimit::counted`]): a program that waits for a
/// processor touches nothing for longer.
const SPAN: Duration = Duration::from_millis(100);

/// How often it is asked what of a control group caches files; that takes 10 us and more.
const LOOK_AT_FILES: Duration = Duration::from_millis(50);
/// Pages of files that were taken from the group and read again since the last look. With more, 1/LEAVE_PART of the group
/// is left free in addition: to read code again and again is slower than far memory, and at last the kernel ends a
/// process. So it is at the start, when code has to be read yet.
const REFAULTS: u64 = 64;
const LEAVE_PART: u64 = 16;
/// Before a fork 1/CHILD_PART is left free for the child and for each one that lives, half of the group at most: what a
/// child writes is there twice, its part of the limit (`paging::fork`), and what it writes until that is seen.
const CHILD_PART: u64 = 6;
/// After how long 1/TAKE_PART of the group is tried again.
const LEFT_FOR: Duration = Duration::from_secs(1);
const TAKE_PART: u64 = 16;
/// A process that reads far memory asks for 1/ASK_PART of the group more than others keep, and gets up to half of that at
/// each look.
const ASK_PART: u64 = 128;
/// It keeps about 1/KEPT_PART of what it has free for what it reads.
const KEPT_PART: u64 = 16;

/// The tier's limit is raised in steps of this part of the process's limit: what the kernel says wavers,
/// and each change wakes the evictor.
const STEP: u64 = 1024;

/// Asking which pages are there takes some 5 us for each open chunk, and at most 1/COUNT_PART of the time: freed local memory
/// waits that much longer for it, half a second where 1 GiB is open.
const COUNT_PART: u32 = 256;

/// Growth between two looks that counts: 1/GROWTH of the limit.
const GROWTH: u64 = 1024;
/// Growth that is expected to go on is left at most 1/AHEAD of the limit.
const AHEAD: u64 = 16;

/// How often code leaves at most. What is in use comes back meanwhile, and is at most what is mapped in this time.
const CODE_EVERY: Duration = Duration::from_millis(250);
/// Code of less than 1/CODE_MIN of the limit stays.
const CODE_MIN: u64 = 16;

/// How long the process may be above its limit before the warning: a start or a fork is over by then.
const OVER_MAX: Duration = Duration::from_secs(1);

/// How long a thread that has room made waits for the next page to leave.
const STALL_MAX: Duration = Duration::from_millis(100);

/// Drops what is resident of the process's code.
static DROP_CODE: OnceLock<fn()> = OnceLock::new();

/// Sets the function that makes code leave. The thread that follows the limits calls it, for heaps that start from now on.
pub fn let_code_leave_by(drop: fn()) {
    // Set before: by the same library.
    let _ = DROP_CODE.set(drop);
}

/// The limit, and what is known about keeping it.
#[derive(Debug)]
pub(super) struct ProcessLimit {
    /// In bytes.
    limit: AtomicU64,
    /// True if far memory has no limit of its own.
    is_for_far: bool,
    /// True if memory of files counts. It does in a limit that somebody has named, not in what a control group leaves: the
    /// kernel takes files back before it ends a process of the group.
    counts_files: bool,
    /// The control group that the limit is a share of, and the bytes that this process may have of it at present.
    group: Option<Mutex<GroupShare>>,
    share: AtomicU64,
    statm: Statm,
    beside: Mutex<BesideFar>,
    /// Since when too little of the limit is left for far memory.
    over: Mutex<OverLimit>,
    /// `None` where code cannot leave.
    code: Option<Mutex<CodeLeft>>,
}

/// When it was last asked whether code should leave, and what had been read from the device when it did.
#[derive(Debug)]
struct CodeLeft {
    drop: fn(),
    at: Instant,
    read: u64,
}

/// Observations of memory that is not far.
#[derive(Debug)]
struct BesideFar {
    bytes: RecentMax,
    /// Growth from one look to the next.
    growth: RecentMax,
    last: Option<u64>,
    /// Not before it is asked which pages are there.
    count_at: Instant,
    /// Bytes of the limit that far memory does not get.
    taken: u64,
    /// Bytes of shared memory, and when the kernel was asked for them.
    shared: Option<(Instant, u64)>,
}

/// A part of a control group.
#[derive(Debug)]
struct GroupShare {
    bytes: u64,
    /// Bytes of it for a process alone there, and for all together: the rest stays free where there are others.
    share: u64,
    usage: GroupUse,
    /// When it was asked about files.
    looked: Instant,
    /// Bytes that stay free because files were taken back, or a child was forked, and when that changed.
    left: u64,
    since: Instant,
    /// Pages that far memory had read at the last look.
    read: u64,
}

#[derive(Clone, Copy, Debug)]
enum OverLimit {
    No,
    Since(Instant),
    /// The warning was printed, and is not repeated until the process was below its limit.
    Told,
}

/// Findings of one look.
#[derive(Clone, Copy, Debug)]
struct Seen {
    resident: u64,
    beside: u64,
    /// Bytes that far memory may have.
    room: ByteCount,
    grows: bool,
}

impl BesideFar {
    /// Bytes of shared memory.
    fn shared(&mut self) -> u64 {
        let known = self.shared.filter(|(at, _)| at.elapsed() < SPAN);
        self.shared.insert(known.unwrap_or_else(|| (Instant::now(), Statm::shared().0))).1
    }
}

impl GroupShare {
    fn of(group: &CgroupLimit) -> GroupShare {
        let usage = GroupUse::of(group.file.parent().unwrap_or(Path::new("")));
        let (bytes, share, now) = (group.bytes.0, group.share().0, Instant::now());
        GroupShare {
            bytes,
            share,
            usage,
            looked: now,
            left: bytes / LEAVE_PART,
            since: now,
            read: 0,
        }
    }

    /// Returns how many bytes this process may have, which had `claimed` so far; `ahead` of the group will be used at once.
    ///
    /// A process that asks goes on until the others give: they leave at least half of what it has, so it leaves no more than
    /// that, but for a little. When it left half of what *they* have, it gave first, and got nothing from one that was idle.
    fn look(&mut self, claimed: u64, ahead: u64, asks: bool) -> u64 {
        const LEAST: u64 = 1 << 20;
        self.usage.look();
        let is_tight = self.usage.used().0 > self.bytes.midpoint(self.share);
        if is_tight || self.looked.elapsed() >= LOOK_AT_FILES {
            self.look_at_files();
        }
        let used = self.usage.used().0 + ahead;
        // Others may need some at once: a half of what they have, the kernel's tables included.
        let others = used.saturating_sub(claimed);
        let (others, asked) =
            if asks { (others.min(claimed), self.bytes / ASK_PART) } else { (others, 0) };
        let most = self.bytes - ((others + LEAST) / 2).min(self.bytes - self.share) + asked;
        let most = most.saturating_sub(self.left);
        if used <= most {
            return claimed + (most - used) / 2;
        }
        let part = u128::from(used - most) * u128::from(claimed) / u128::from(used);
        claimed.saturating_sub(part as u64)
    }

    fn look_at_files(&mut self) {
        let before = self.usage.refaults();
        self.usage.look_at_files();
        self.looked = Instant::now();
        if self.usage.refaults().saturating_sub(before) >= REFAULTS {
            self.left = (self.left + self.bytes / LEAVE_PART).min(self.bytes / 2);
            self.since = self.looked;
        } else if self.since.elapsed() >= LEFT_FOR {
            self.left = self.left.saturating_sub(self.bytes / TAKE_PART);
            self.since = self.looked;
        }
    }
}

impl ProcessLimit {
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) where the kernel does not tell what is resident.
    pub(super) fn new(
        limit: ByteCount,
        is_for_far: bool,
        counts_files: bool,
    ) -> Result<ProcessLimit> {
        let now = Instant::now();
        let memory = if counts_files { Memory::default() } else { Memory::detect() };
        let share = memory.room().map_or(u64::MAX, |room| room.0);
        let group = memory.fullest.as_ref().map(|group| Mutex::new(GroupShare::of(group)));
        let (bytes, growth) = (RecentMax::new(now), RecentMax::new(now));
        Ok(ProcessLimit {
            limit: AtomicU64::new(limit.0),
            is_for_far,
            counts_files,
            group,
            share: AtomicU64::new(share),
            statm: Statm::open()?,
            beside: Mutex::new(BesideFar {
                bytes,
                growth,
                last: None,
                count_at: now,
                taken: 0,
                shared: None,
            }),
            over: Mutex::new(OverLimit::No),
            code: DROP_CODE
                .get()
                .filter(|_| counts_files)
                .map(|&drop| Mutex::new(CodeLeft { drop, at: now, read: 0 })),
        })
    }

    pub(super) fn limit(&self) -> ByteCount {
        ByteCount(self.limit.load(Ordering::Relaxed))
    }

    /// Bytes that the process may have at present.
    fn most(&self) -> u64 {
        self.limit().0.min(self.share.load(Ordering::Relaxed))
    }

    /// Changes the limit, of far memory too where that has no limit of its own.
    ///
    /// # Errors
    /// As [`Region::set_limit`].
    pub(super) fn set(&self, limit: ByteCount, region: &Region) -> Result<()> {
        self.limit.store(limit.0, Ordering::Relaxed);
        self.look(region, ByteCount::ZERO);
        if self.is_for_far { region.set_limit(limit) } else { Ok(()) }
    }

    /// Gives far memory the part of the limit that the rest of the process does not use. Returns when to look again.
    pub(super) fn follow(&self, region: &Region) -> Duration {
        self.let_code_leave(region);
        self.look_at_group(region);
        let Some(seen) = self.look(region, ByteCount::ZERO) else { return LOOK_EVERY };
        self.tell(ByteCount(seen.beside), seen.room < region.limit_min(), region);
        let is_near = seen.resident + self.limit().0 / AHEAD >= self.most();
        if seen.grows && is_near { LOOK_SOON } else { LOOK_EVERY }
    }

    /// Takes what the group has for this process.
    fn look_at_group(&self, region: &Region) {
        let Some(group) = &self.group else { return };
        let mut beside = self.beside.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(resident) = self.resident(&mut beside) else { return };
        let (charged, taken) = (region.budget().charged().0, beside.taken);
        // What is charged comes: it counts as used.
        let claimed = charged + resident.saturating_sub(charged).max(beside.last.unwrap_or(0));
        drop(beside);
        let mut group = group.lock().unwrap_or_else(PoisonError::into_inner);
        let read = pages_in(region);
        let is_read = std::mem::replace(&mut group.read, read) != read;
        // A region that is read keeps a little free under its limit, which it is not to lose by that.
        let kept = (region.limit().0 + taken).saturating_sub(claimed).min(charged / KEPT_PART);
        let kept = if is_read { kept } else { 0 };
        let share = group.look(claimed + kept, claimed - resident.min(claimed), is_read);
        self.share.store(share, Ordering::Relaxed);
    }

    /// Resident bytes that count.
    fn resident(&self, beside: &mut BesideFar) -> Option<u64> {
        let (resident, of_files) = self.statm.look()?;
        Some(match self.counts_files {
            true => resident.0,
            false => resident.0.saturating_sub(of_files.0) + beside.shared(),
        })
    }

    /// Evicts far memory for `len` bytes that the caller is about to touch, and waits until they fit, or
    /// nothing more leaves. Returns after how many more bytes this is to be called again.
    pub(super) fn make_room(&self, region: &Region, len: ByteCount) -> ByteCount {
        /// Of what is left of the limit, one caller takes a part before it looks again.
        const CALLERS: u64 = 4;
        let least = self.limit().0 / GROWTH;
        let (mut stall, mut least_charged) = (Deadline::new(STALL_MAX), u64::MAX);
        loop {
            let Some(seen) = self.look(region, len) else { return ByteCount(least) };
            let charged = region.budget().charged();
            let left = self.most().saturating_sub(seen.resident + len.0);
            if left > 0 || charged <= seen.room.max(region.limit_min()) {
                return ByteCount((left / CALLERS).max(least));
            }
            if charged.0 < least_charged {
                least_charged = charged.0;
                stall.restart();
            }
            if stall.is_over() {
                return ByteCount(least);
            }
            // The evictor has no one to tell.
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Makes room in the control group for what a child that is forked next writes, and waits until it is there, or nothing
    /// more leaves: what parent and child share cannot leave.
    pub(super) fn make_room_for_child(&self, region: &Region) {
        let Some(group) = &self.group else { return };
        let mut group = group.lock().unwrap_or_else(PoisonError::into_inner);
        let children = (region.children() as u64 + 1).min(CHILD_PART / 2);
        group.left = group.left.max(group.bytes / CHILD_PART * children);
        group.since = Instant::now();
        drop(group);
        self.look_at_group(region);
        let _ = self.make_room(region, ByteCount::ZERO);
    }

    /// Looks, and lets far memory have what is left beside `ahead`, which is not resident yet.
    fn look(&self, region: &Region, ahead: ByteCount) -> Option<Seen> {
        let mut beside = self.beside.lock().unwrap_or_else(PoisonError::into_inner);
        let resident = self.resident(&mut beside)?;
        // Read after `resident`: a page that comes in between the two is not counted as local memory.
        let bytes = resident.saturating_sub(region.budget().charged().0);
        let now = Instant::now();
        let grown = bytes.saturating_sub(beside.last.replace(bytes).unwrap_or(bytes));
        let grows = grown > self.limit().0 / GROWTH;
        let grown =
            beside.growth.note(if grows { grown.min(self.limit().0 / AHEAD) } else { 0 }, now);
        let mut taken = beside.bytes.note(bytes + ahead.0, now) + grown;
        if taken + self.limit().0 / STEP <= beside.taken {
            let counted = self.counted(region, &mut beside, now);
            let most = counted.map(|bytes| beside.bytes.note(bytes + ahead.0, now));
            taken = most.map_or(beside.taken, |most| most + grown);
        }
        beside.taken = taken;
        let room = ByteCount(self.most().saturating_sub(beside.taken));
        let had = region.limit();
        if room < had || room.0 - had.0 >= self.limit().0 / STEP {
            region.leave_room(room);
        }
        Some(Seen { resident, beside: bytes, room, grows })
    }

    /// Bytes that are not far memory, by a look at which pages of that are there. `None` where it is too early for one.
    fn counted(&self, region: &Region, beside: &mut BesideFar, now: Instant) -> Option<u64> {
        if now < beside.count_at {
            return None;
        }
        // First what is absent: what the program touches after that counts as not far.
        let far = region.stats();
        let counted = self.resident(beside)? + far.charged_bytes.0 - far.resident_bytes.0;
        beside.count_at = Instant::now() + now.elapsed() * COUNT_PART;
        Some(counted.saturating_sub(region.budget().charged().0))
    }

    /// Makes code leave where that may give far memory more than it costs: since the last time the device was read
    /// for more than files hold.
    fn let_code_leave(&self, region: &Region) {
        let Some(left) = &self.code else { return };
        let mut left = left.lock().unwrap_or_else(PoisonError::into_inner);
        if left.at.elapsed() < CODE_EVERY {
            return;
        }
        let Some((_, of_files)) = self.statm.look() else { return };
        let read = pages_in(region) * crate::sys::vm::KERNEL_PAGE as u64;
        if of_files.0 >= self.limit().0 / CODE_MIN && read >= left.read + of_files.0 {
            (left.drop)();
            left.read = read;
        }
        left.at = Instant::now();
    }

    /// Warns when memory that is not far has been too much for [`OVER_MAX`].
    fn tell(&self, beside: ByteCount, is_over: bool, region: &Region) {
        let mut over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        *over = match *over {
            _ if !is_over => OverLimit::No,
            OverLimit::No => OverLimit::Since(Instant::now()),
            OverLimit::Since(since) if since.elapsed() >= OVER_MAX => {
                let (limit, floor) = (ByteCount(self.most()), region.limit_min());
                let whose = if self.group.is_some() {
                    "the share of its control group that others leave it,"
                } else {
                    "its limit of"
                };
                let would_do = ByteCount((beside.0 + floor.0).next_multiple_of(1 << 20));
                messages::warn(
                    "the process is above its limit",
                    format_args!(
                        "the process is above {whose} {limit}: {beside} of it is not far memory (code, stacks, \
                         local memory, memory mapped by the program), and far memory needs {floor}. A limit of {would_do} \
                         would do, more is faster"
                    ),
                );
                OverLimit::Told
            }
            unchanged => unchanged,
        };
    }
}

/// The maximum of a number over the last [`SPAN`], and up to as much before it.
#[derive(Debug)]
struct RecentMax {
    began: Instant,
    current: u64,
    previous: u64,
}

impl RecentMax {
    fn new(now: Instant) -> RecentMax {
        RecentMax { began: now, current: 0, previous: 0 }
    }

    /// Notes the number as it is now; returns the maximum.
    fn note(&mut self, number: u64, now: Instant) -> u64 {
        let age = now.saturating_duration_since(self.began);
        if age >= SPAN {
            // A stop of any length is one span: what is charged and not there yet has not come meanwhile.
            (self.began, self.previous, self.current) = (now, self.current, 0);
        }
        self.current = self.current.max(number);
        self.current.max(self.previous)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_maximum_counts_for_one_to_two_spans() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut recent = RecentMax::new(start);
        assert_eq!(recent.note(5, at(10)), 5);
        assert_eq!(recent.note(9, at(90)), 9);
        assert_eq!(recent.note(3, at(110)), 9, "of the span before");
        assert_eq!(recent.note(4, at(199)), 9);
        assert_eq!(recent.note(2, at(215)), 4);
        assert_eq!(recent.note(1, at(900)), 2, "the process was stopped");
        assert_eq!(recent.note(0, at(1001)), 1);
    }

    #[test]
    fn a_process_that_reads_gets_memory_of_one_that_does_not_from_whatever_it_has() {
        const MIB: u64 = 1 << 20;
        let dir = tempfile::tempdir().expect("a directory");
        let bytes = 128 * MIB;
        // Resident memory of the one that reads, which is the heap's least and more.
        for least in 9..24 {
            let file = dir.path().join("memory.max");
            let group = CgroupLimit { bytes: ByteCount(bytes), file, used: ByteCount::ZERO };
            let use_of = |used: u64| {
                std::fs::write(dir.path().join("memory.current"), used.to_string()).expect("room");
                assert!(used < bytes, "{least}: the kernel ends a process");
            };
            let mut small = least * MIB;
            let mut large = group.share().0 - small;
            use_of(large + small);
            let mut shares = [GroupShare::of(&group), GroupShare::of(&group)];
            // As after a while in which the kernel has taken no files back.
            shares.iter_mut().for_each(|share| share.left = 0);
            let mut looks = 0;
            while small < 32 * MIB {
                large = large.min(shares[0].look(large, 0, false));
                use_of(large + small);
                small = shares[1].look(small, 0, true);
                use_of(large + small);
                looks += 1;
                assert!(looks < 5_000, "{least}: it has {small} bytes, the other one {large}");
            }
        }
    }
}
