//! The page protocol under loom: one page, a few frames and slots, every interleaving.
//!
//! [`PageWord`], [`FrameMeta`] and all of [`protocol`](crate::paging::page::protocol) are the code that runs. The
//! functions here are the callers' other half, in the order in which `region::{handler, evictor,
//! pager, control}` do it; each names the function it mirrors. A page's content is a version
//! number, 0 for zeros. The kernel and the device are plain values under a lock that loom does
//! not see, so that they order nothing but
//! what the kernel orders: a fault comes after the unmapping it is due to.
//!
//! Checked: content is never in two places that count, a read returns what was written last, a
//! discarded page never shows what it held, no frame or slot is leaked or freed twice, and every
//! thread that waits for a page is woken (loom reports one that waits for ever).

mod cases;

use crate::base::sync::{AtomicUsize, Ordering};
use crate::base::units::{PageId, SlotId};
use crate::paging::page::frame_meta::{FrameMeta, FrameOutcome};
use crate::paging::page::protocol::{self, Borrowed, Content, Discard, Filled, Written};
use crate::paging::page::word::{FrameId, PageWord, State, Word};
use loom::thread;
use std::sync::{Arc, Mutex, MutexGuard};

const FRAMES: usize = 3;
const SLOTS: usize = 4;
const THREADS: usize = 4;
const PAGE: PageId = PageId(7);
/// Content that must never be read.
const GARBAGE: u32 = 0xBAD;
/// Result of touching a lost page.
const LOST: u32 = 0x105;

#[derive(Clone, Copy, Debug)]
struct Mapped {
    version: u32,
    protected: bool,
}

/// Kernel, device, and the lists of what is free.
#[derive(Debug)]
struct Machine {
    region: Option<Mapped>,
    frames: [Option<u32>; FRAMES],
    free_frames: Vec<usize>,
    slots: [u32; SLOTS],
    free_slots: Vec<u64>,
    /// Threads that sleep in a fault.
    waiting: [bool; THREADS],
    /// Mappings that fail before one succeeds.
    failing_maps: u32,
    /// A touch is SIGBUS.
    poisoned: bool,
}

struct Model {
    word: PageWord,
    notes: [FrameMeta; FRAMES],
    machine: Mutex<Machine>,
    /// The kernel's lock on the mapping: who faults has seen everything that was done before the
    /// page was unmapped. Also where loom may switch threads in an access.
    mapping: AtomicUsize,
    /// Fills for reads are write-protected (install by COPY).
    protects: bool,
    /// Threads read for themselves, and a watchdog may revoke that.
    in_thread: bool,
}

/// The evictor's own state.
#[derive(Default)]
struct Evictor {
    cooling: Vec<FrameId>,
    borrowed: Vec<(FrameId, Option<SlotId>)>,
    fail_writes: bool,
    /// Pages are taken back out of a write that does not end.
    rescue: Option<Rescue>,
}

/// Outcome of a rescue.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rescue {
    Works,
    /// The kernel holds on to the frame.
    Refused,
}

/// Kind of an access.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write(u32),
}

impl Model {
    fn new(protects: bool) -> Model {
        let machine = Machine {
            region: None,
            frames: [None; FRAMES],
            free_frames: (0..FRAMES).collect(),
            slots: [u32::MAX; SLOTS],
            free_slots: (0..SLOTS as u64).collect(),
            waiting: [false; THREADS],
            failing_maps: 0,
            poisoned: false,
        };
        Model {
            word: PageWord::default(),
            notes: Default::default(),
            machine: Mutex::new(machine),
            mapping: AtomicUsize::new(0),
            protects,
            in_thread: false,
        }
    }

    /// A page that holds version 1 and is resident, never written to the device.
    fn resident() -> Model {
        let model = Model::new(false);
        assert_eq!(model.access(0, Access::Write(1)), 1);
        model
    }

    /// A page that holds version 1 on the device.
    fn stored(protects: bool) -> Model {
        let model = Model::new(protects);
        assert_eq!(model.access(0, Access::Write(1)), 1);
        let mut evictor = Evictor::default();
        model.evict(&mut evictor);
        model.settle(&mut evictor);
        assert_eq!(model.word.load().state(), State::Stored);
        model
    }

    /// The machine, as a thread sees it that touches the page without looking at its word.
    fn touch(&self) -> MutexGuard<'_, Machine> {
        self.mapping.fetch_add(0, Ordering::Acquire);
        self.machine()
    }

    fn machine(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().expect("no thread of a model survives a panic")
    }

    fn note(&self, frame: FrameId) -> &FrameMeta {
        &self.notes[frame.0 as usize]
    }

    fn change(&self, from: Word, to: Word) {
        self.word.try_change(from, to).unwrap_or_else(|now| panic!("{from:?} became {now:?}"));
    }

    // The application.

    /// Touches the page until it is there; returns what it holds then.
    fn access(&self, me: usize, access: Access) -> u32 {
        loop {
            let protected = {
                let mut machine = self.touch();
                if machine.poisoned {
                    return LOST;
                }
                let mapped = machine.region.is_some();
                match (&mut machine.region, access) {
                    (Some(mapped), Access::Read) => return mapped.version,
                    (Some(mapped), Access::Write(version)) if !mapped.protected => {
                        mapped.version = version;
                        return version;
                    }
                    _ => {}
                }
                // As in the kernel: no wake-up comes between the look and the sleep.
                machine.waiting[me] = true;
                mapped
            };
            self.resolve(protected, access);
            // Also when woken: the thread may have been answered by a word that is out of date.
            thread::yield_now();
            while self.machine().waiting[me] {
                thread::yield_now();
            }
        }
    }

    // The handler: `Handler::resolve` and what it calls.

    fn wake(&self) {
        self.machine().waiting = [false; THREADS];
    }

    fn resolve(&self, protected: bool, access: Access) {
        loop {
            let word = self.word.load();
            let answered = match word.state() {
                State::Empty => self.fill_zeros(),
                State::Stored => self.fill(word, Some(access)),
                State::Filling => !word.dead() && protocol::want(&self.word, word),
                State::Moving => false,
                State::Resident => self.touch_resident(word, protected),
                State::Cooling => self.take_back(word),
                State::Writing => self.copy_out(word),
                State::Poisoned => {
                    self.wake();
                    true
                }
            };
            if answered {
                return;
            }
            thread::yield_now();
        }
    }

    fn fill_zeros(&self) -> bool {
        let moving = Word::moving(None);
        if self.word.try_change(Word::EMPTY, moving).is_err() {
            return false;
        }
        self.map(Mapped { version: 0, protected: false });
        self.change(moving, Word::resident(None));
        true
    }

    /// Installs content, which wakes.
    fn map(&self, mapped: Mapped) {
        self.map_silently(mapped);
        self.wake();
    }

    fn map_silently(&self, mapped: Mapped) {
        {
            let mut machine = self.machine();
            assert!(machine.region.is_none(), "mapped twice");
            machine.region = Some(mapped);
        }
        self.mapping.fetch_add(1, Ordering::Release);
    }

    /// Takes the page out of the region; returns what it held.
    fn unmap(&self, machine: &mut Machine) -> u32 {
        machine.region.take().expect("resident, so it is mapped").version
    }

    /// The release that goes with `unmap`, outside of the machine's lock.
    fn unmapped(&self) {
        self.mapping.fetch_add(1, Ordering::Release);
    }

    /// `start_fill`, the device, `finish_read`, `install`. Without an access the page is read
    /// ahead.
    fn fill(&self, word: Word, access: Option<Access>) -> bool {
        let Some(frame) = self.take_frame() else { return false };
        let slot = word.slot();
        self.note(frame).write(PAGE, slot);
        let filling = Word::filling(frame).with_wanted(access.is_some());
        if self.word.try_change(word, filling).is_err() {
            self.free_frame(frame);
            return false;
        }
        let at = slot.expect("stored").as_usize();
        if self.in_thread {
            self.note(frame).begin_read(1);
        }
        let version = self.machine().slots[at];
        self.machine().frames[frame.0 as usize] = Some(version);
        if self.in_thread && !self.note(frame).end_read() {
            // `Pager::clear_up`.
            while self.word.load().is_filling(frame) {
                thread::yield_now();
            }
            assert_eq!(self.machine().slots[at], version, "the slot was written under the read");
            assert!(!self.word.load().is_filling(frame), "freed under its page's word");
            self.free_slot(slot);
            self.empty_frame(frame);
            return true;
        }
        match protocol::filled(&self.word, frame, slot) {
            Filled::Moving { moving, wanted } => {
                assert!(wanted || access.is_none(), "the mark was lost");
                let content = self.machine().frames[frame.0 as usize].take();
                let protected = self.protects && access.is_none_or(|access| access == Access::Read);
                self.map_silently(Mapped { version: content.expect("just read"), protected });
                self.change(moving, Word::resident(slot).with_protected(protected));
                if wanted {
                    self.wake();
                }
            }
            Filled::Died(dead) => {
                self.free_slot(slot);
                self.change(dead, Word::EMPTY);
                self.wake();
                self.machine().frames[frame.0 as usize] = None;
            }
        }
        self.free_frame(frame);
        true
    }

    /// `Watchdog::look` at a time at which all deadlines are over, and `Pager::revoke`.
    fn revoke(&self) {
        for frame in (0..FRAMES as u32).map(FrameId) {
            let Some(turn) = self.note(frame).read_under_way() else { continue };
            if !self.note(frame).revoke_read(turn) {
                continue;
            }
            assert_eq!(self.note(frame).page(), PAGE);
            match protocol::filled(&self.word, frame, None) {
                Filled::Moving { moving, .. } => {
                    self.machine().poisoned = true;
                    self.mapping.fetch_add(1, Ordering::Release);
                    self.change(moving, Word::poisoned(None));
                }
                Filled::Died(dead) => self.change(dead, Word::EMPTY),
            }
            self.wake();
        }
    }

    fn touch_resident(&self, word: Word, protected: bool) -> bool {
        if !protected {
            self.wake();
            return true;
        }
        let Ok((moving, opened)) = protocol::open_for_writes(&self.word, word) else {
            return false;
        };
        // The lift is a call of its own.
        thread::yield_now();
        self.machine().region.as_mut().expect("this thread's").protected = false;
        self.change(moving, opened);
        self.wake();
        true
    }

    fn take_back(&self, word: Word) -> bool {
        let frame = word.frame().expect("cooling");
        let Ok(slot) = protocol::take_back(&self.word, word, self.note(frame)) else {
            return false;
        };
        let moving = Word::moving(None);
        {
            let mut machine = self.machine();
            if machine.failing_maps > 0 {
                machine.failing_maps -= 1;
                drop(machine);
                self.change(moving, Word::cooling(frame));
                return false;
            }
        }
        let content = self.machine().frames[frame.0 as usize].take();
        self.map(Mapped { version: content.expect("not taken yet"), protected: false });
        self.change(moving, Word::resident(slot));
        self.note(frame).decide(FrameOutcome::MovedBack);
        true
    }

    fn copy_out(&self, word: Word) -> bool {
        let frame = word.frame().expect("being written");
        if protocol::copy_out(&self.word, word).is_err() {
            return false;
        }
        let content = self.machine().frames[frame.0 as usize];
        self.map(Mapped { version: content.expect("being written"), protected: false });
        self.change(Word::moving(None), Word::resident(None));
        self.note(frame).decide(FrameOutcome::Dropped);
        true
    }

    // The evictor.

    /// `take_victim`, then `drop_clean` or `move_out`.
    fn evict(&self, evictor: &mut Evictor) {
        let word = loop {
            let word = self.word.load();
            match word.state() {
                State::Resident if self.word.try_change(word, word.leaving()).is_ok() => {
                    break word.leaving();
                }
                State::Resident | State::Moving => thread::yield_now(),
                _ => return,
            }
        };
        if word.pins() > 0 {
            return self.change(word, word.kept());
        }
        if let Some(slot) = word.slot().filter(|_| word.protected()) {
            {
                let mut machine = self.machine();
                let content = self.unmap(&mut machine);
                assert_eq!(content, machine.slots[slot.as_usize()], "dropped, but not clean");
            }
            self.unmapped();
            return self.change(word, Word::stored(slot));
        }
        let Some(frame) = self.take_frame() else { return self.change(word, word.kept()) };
        {
            let mut machine = self.machine();
            let content = self.unmap(&mut machine);
            machine.frames[frame.0 as usize] = Some(content);
        }
        self.unmapped();
        self.note(frame).write(PAGE, word.slot());
        self.change(word, Word::cooling(frame));
        evictor.cooling.push(frame);
    }

    /// `finish_cooling` and everything after it, until nothing is on its way out.
    fn settle(&self, evictor: &mut Evictor) {
        while !evictor.cooling.is_empty() || !evictor.borrowed.is_empty() {
            for frame in std::mem::take(&mut evictor.cooling) {
                self.finish_frame(evictor, frame);
            }
            self.finish_borrowed(evictor);
        }
    }

    fn finish_frame(&self, evictor: &mut Evictor, frame: FrameId) {
        assert_eq!(self.note(frame).page(), PAGE);
        let slot = self.note(frame).slot();
        let content = {
            let machine = self.machine();
            match machine.frames[frame.0 as usize] {
                Some(version) => match slot.filter(|s| machine.slots[s.as_usize()] == version) {
                    Some(slot) => Content::Clean(slot),
                    None if version == 0 => Content::Zero,
                    None => Content::Dirty,
                },
                // Taken away while it was hashed: any value will do.
                None => Content::Dirty,
            }
        };
        if !protocol::cooled(&self.word, frame, content) {
            return evictor.borrowed.push((frame, None));
        }
        match content {
            Content::Dirty => return self.write(evictor, frame),
            Content::Clean(_) => {}
            Content::Zero => self.free_slot(slot),
        }
        self.empty_frame(frame);
    }

    /// `start_write`, the device, `finish_write`.
    fn write(&self, evictor: &mut Evictor, frame: FrameId) {
        let new = self.take_slot();
        let before = self.machine().frames[frame.0 as usize];
        let rescued = evictor.rescue.is_some_and(|how| self.rescue(frame, how));
        let old = self.note(frame).slot();
        let after = self.machine().frames[frame.0 as usize];
        assert!(rescued || before == after, "the frame changed under the device");
        if evictor.fail_writes {
            self.free_slot(Some(new));
            return self.put_back(evictor, frame, old);
        }
        // Of a rescued page the device got nothing that anybody may use.
        self.machine().slots[new.as_usize()] = after.unwrap_or(GARBAGE);
        let outcome = protocol::written(&self.word, frame, new);
        self.free_slot(old);
        match outcome {
            Written::Won => {}
            Written::Taken => return evictor.borrowed.push((frame, Some(new))),
        }
        self.empty_frame(frame);
    }

    fn rescue(&self, frame: FrameId, how: Rescue) -> bool {
        if !protocol::rescue(&self.word, frame) {
            return false;
        }
        if how == Rescue::Refused {
            protocol::not_rescued(&self.word, frame);
            return false;
        }
        let content = self.machine().frames[frame.0 as usize].take();
        self.map(Mapped { version: content.expect("being written"), protected: false });
        let slot = self.note(frame).slot();
        self.note(frame).forget_slot();
        self.change(Word::moving(None), Word::resident(slot));
        self.note(frame).decide(FrameOutcome::MovedBack);
        true
    }

    fn put_back(&self, evictor: &mut Evictor, frame: FrameId, old: Option<SlotId>) {
        match protocol::unwritten(&self.word, frame, old) {
            Written::Won => {
                let content = self.machine().frames[frame.0 as usize].take();
                self.map(Mapped { version: content.expect("kept"), protected: false });
                self.change(Word::moving(old), Word::resident(old));
                self.free_frame(frame);
            }
            Written::Taken => {
                self.free_slot(old);
                evictor.borrowed.push((frame, None));
            }
        }
    }

    fn finish_borrowed(&self, evictor: &mut Evictor) {
        for (frame, written) in std::mem::take(&mut evictor.borrowed) {
            match protocol::look_at_borrowed(&self.word, frame, self.note(frame)) {
                Borrowed::Wait => {
                    evictor.borrowed.push((frame, written));
                    thread::yield_now();
                    continue;
                }
                Borrowed::Cooling => {
                    evictor.cooling.push(frame);
                    continue;
                }
                Borrowed::Over(false) => self.free_frame(frame),
                Borrowed::Over(true) => self.empty_frame(frame),
            }
            self.free_slot(written);
        }
    }

    // The thread that discards and pins.

    /// `Pager::discard` of one page.
    fn discard(&self) {
        loop {
            match protocol::discard(&self.word, |frame| self.note(frame)) {
                Discard::Done => return,
                Discard::Freed(slot) => return self.free_slot(slot),
                Discard::Dropped(frame, slot) => {
                    self.free_slot(slot);
                    return self.note(frame).decide(FrameOutcome::Dropped);
                }
                Discard::Abandoned(frame) => return self.note(frame).decide(FrameOutcome::Dropped),
                Discard::Mapped(word) => {
                    if self.word.try_change(word, word.leaving()).is_ok() {
                        let word = word.leaving();
                        self.unmap(&mut self.machine());
                        self.unmapped();
                        self.free_slot(word.slot());
                        return self.change(word, Word::EMPTY);
                    }
                }
                Discard::Mend(slot) => {
                    self.free_slot(slot);
                    self.machine().poisoned = false;
                    return self.change(Word::moving(None), Word::EMPTY);
                }
                Discard::Busy | Discard::Changed => thread::yield_now(),
            }
        }
    }

    /// `Pins::pin_page`, some use, `Pins::end`.
    fn pin_and_unpin(&self, me: usize) {
        loop {
            let word = self.word.load();
            if word.state() != State::Resident {
                self.access(me, Access::Read);
                thread::yield_now();
                continue;
            }
            let pinned = word.pinned().expect("few pins");
            if self.word.try_change(word, pinned).is_ok() {
                break;
            }
        }
        for _ in 0..2 {
            assert!(self.touch().region.is_some(), "a pinned page was unmapped");
        }
        loop {
            let word = self.word.load();
            if word.state() == State::Moving {
                thread::yield_now();
                continue;
            }
            let unpinned = word.unpinned().expect("pinned above");
            if self.word.try_change(word, unpinned).is_ok() {
                return;
            }
        }
    }

    // What is free.

    fn take_frame(&self) -> Option<FrameId> {
        let mut machine = self.machine();
        let frame = machine.free_frames.pop()?;
        assert_eq!(machine.frames[frame], None, "a free frame has content");
        Some(FrameId(frame as u32))
    }

    /// Lists a frame without content as free.
    fn free_frame(&self, frame: FrameId) {
        let mut machine = self.machine();
        let at = frame.0 as usize;
        assert!(!machine.free_frames.contains(&at), "{frame:?} is freed twice");
        assert_eq!(machine.frames[at], None, "a frame is freed with its content");
        machine.free_frames.push(at);
    }

    /// Drops the content of a frame and lists it as free.
    fn empty_frame(&self, frame: FrameId) {
        let content = self.machine().frames[frame.0 as usize].take();
        assert!(content.is_some(), "the content of {frame:?} is gone already");
        self.free_frame(frame);
    }

    fn take_slot(&self) -> SlotId {
        let mut machine = self.machine();
        assert!(!machine.free_slots.is_empty(), "more slots than can be in use");
        SlotId(machine.free_slots.swap_remove(0))
    }

    fn free_slot(&self, slot: Option<SlotId>) {
        let Some(slot) = slot else { return };
        let mut machine = self.machine();
        assert!(!machine.free_slots.contains(&slot.0), "{slot} is freed twice");
        machine.slots[slot.as_usize()] = u32::MAX;
        machine.free_slots.push(slot.0);
    }

    // The end.

    /// When all threads are done: nothing is leaked, nobody waits, and the page holds one of
    /// `versions`.
    fn finish(&self, versions: &[u32]) {
        let word = self.word.load();
        let slot = match word.state() {
            State::Empty => None,
            State::Resident | State::Stored | State::Poisoned => word.slot(),
            _ => panic!("{word:?} at the end"),
        };
        {
            let machine = self.machine();
            assert_eq!(machine.free_frames.len(), FRAMES, "a frame is lost");
            let used = SLOTS - machine.free_slots.len();
            assert_eq!(used, usize::from(slot.is_some()), "slots in use; the word is {word:?}");
            assert_eq!(machine.region.is_some(), word.state() == State::Resident);
            assert_eq!(machine.waiting, [false; THREADS], "somebody waits for ever");
            assert_eq!(word.pins(), 0);
        }
        let seen = self.access(0, Access::Read);
        assert!(versions.contains(&seen), "version {seen} is none of {versions:?}");
    }
}

type Thread = Box<dyn Fn(&Model) + Send + Sync>;

/// Runs the threads on a model in every order with up to `preemptions` involuntary switches.
fn explore(
    preemptions: usize,
    make: fn() -> Model,
    threads: Vec<Thread>,
    versions: &'static [u32],
) {
    let threads: Vec<Arc<Thread>> = threads.into_iter().map(Arc::new).collect();
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 5_000;
    builder.check(move || {
        let model = loom::sync::Arc::new(make());
        let handles: Vec<_> = threads
            .iter()
            .map(|body| {
                let (model, body) = (model.clone(), Arc::clone(body));
                thread::spawn(move || body(&model))
            })
            .collect();
        handles.into_iter().for_each(|handle| handle.join().expect("no panic"));
        model.finish(versions);
    });
}

fn evicting(times: usize) -> Thread {
    Box::new(move |model| {
        let mut evictor = Evictor::default();
        for _ in 0..times {
            model.evict(&mut evictor);
            model.settle(&mut evictor);
        }
    })
}

fn reading(me: usize, versions: &'static [u32]) -> Thread {
    Box::new(move |model| {
        let seen = model.access(me, Access::Read);
        assert!(versions.contains(&seen), "version {seen} is none of {versions:?}");
    })
}

fn writing(me: usize, version: u32, then: &'static [u32]) -> Thread {
    Box::new(move |model| {
        model.access(me, Access::Write(version));
        let seen = model.access(me, Access::Read);
        assert!(then.contains(&seen), "version {seen} is none of {then:?}");
    })
}

fn discarding(me: usize, then: &'static [u32]) -> Thread {
    Box::new(move |model| {
        model.discard();
        let seen = model.access(me, Access::Read);
        assert!(then.contains(&seen), "version {seen} after a discard, none of {then:?}");
    })
}
