//! The servers that hold all of a table, as this process knows them and as their marks record them.
//!
//! All are equal: each has a mark, a beat and a lease of its own, see [`table`](crate::table). A mark also records for each
//! copy the last generation of the set in which it counted; those with the greatest number are the set.
//!
//! ```text
//!   a copy, while the table is open:
//!     filled ----lacks nothing----> joining --FLUSH; the others record it; it records itself--> whole
//!       |                             |                                                          |
//!       '-- its connection breaks ----'---- misses a write or a flush, and is not the last ------'--> left out
//!
//!   a write:   done by all members? --yes--> has each recorded the last set that left one out? --yes--> Done
//!                '--by a whole one--> the others are left out: the next generation --'  '--no--> waits for it
//!                '--by none---------> Late or Failed, as on one server
//!
//!   at the opening, of those that answer:
//!     the greatest generation of its own --names a copy that does not answer----> refused: it may have gone on alone
//!       '--all of its set closed by the same run--> they count      '--else one counts: others may differ from it in
//!                                                                       writes that were under way
//!     the others are filled from those that count
//! ```
//! A copy that was left out is not used any more while the table is open: a write may reach it late, and what it has not
//! flushed nobody looks at. The next opener waits until no connection delivers anything, as on one server.
//!
//! # Invariants
//! 1. No write or flush is reported that a copy misses, before all that are left have recorded a set without it. So of two
//!    sets that follow each other one copy knows the later one: an opener that asks all of a set finds out whether there was another.
//! 2. A copy that is filled records generation 0 for itself until the others record that it counts: they cannot have gone
//!    on without it then, nor it without them.
//! 3. One that joins has all writes that were reported before it flushes; later ones wait for it. It counts as whole, so
//!    that it is read and may be the last, when its own record is durable.

use crate::ends::SERVERS_MAX;
use crate::sync::{AtomicU64, Ordering, fence};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum number of servers that hold the same bytes.
pub(crate) const COPIES_MAX: usize = 4;

/// A set of servers, by number.
pub(crate) type Servers = u8;

const _: () = assert!(COPIES_MAX <= SERVERS_MAX && SERVERS_MAX <= Servers::BITS as usize);

/// The numbers of servers.
pub(crate) fn each(servers: Servers) -> impl Iterator<Item = usize> {
    (0..Servers::BITS as usize).filter(move |at| servers >> at & 1 == 1)
}

/// A copy of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CopyRecord {
    /// Random number; 0: none.
    pub(crate) id: u64,
    /// The last generation of the set in which it counted.
    pub(crate) counted: u64,
}

/// All copies of a table that are known.
pub(crate) type CopyList = [CopyRecord; COPIES_MAX];

/// The part of a mark that records the copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SetRecord {
    /// Random number of the table.
    pub(crate) table: u64,
    /// The copy that lies there.
    pub(crate) own: u64,
    pub(crate) copies: CopyList,
}

impl fmt::Display for SetRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "table {} copy {} of", self.table, self.own)?;
        let mut copies = self.copies.iter().filter(|copy| copy.id != 0);
        copies.try_for_each(|copy| write!(f, " {}:{}", copy.id, copy.counted))
    }
}

impl SetRecord {
    /// Reads the words that it is written as.
    pub(crate) fn parse(words: &[&str]) -> Option<SetRecord> {
        let ["table", table, "copy", own, "of", list @ ..] = words else { return None };
        let mut copies = CopyList::default();
        for (place, copy) in list.iter().enumerate() {
            let (id, counted) = copy.split_once(':')?;
            *copies.get_mut(place)? =
                CopyRecord { id: id.parse().ok()?, counted: counted.parse().ok()? };
        }
        Some(SetRecord { table: table.parse().ok()?, own: own.parse().ok()?, copies })
    }

    fn counted(&self, id: u64) -> Option<u64> {
        self.copies.iter().find(|copy| copy.id == id).map(|copy| copy.counted)
    }

    /// The generation of the set in which the copy itself counted last; 0: it never did.
    pub(crate) fn generation(&self) -> u64 {
        self.counted(self.own).unwrap_or(0)
    }
}

/// A server that answers, at the opening.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FoundCopy {
    pub(crate) record: SetRecord,
    /// The run that has closed it.
    pub(crate) closed_by: Option<u64>,
}

/// The servers of a table that is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChosenCopies {
    pub(crate) table: u64,
    /// Those of the servers, in their order, and then others.
    pub(crate) copies: CopyList,
    /// Those that count.
    pub(crate) members: Servers,
}

const PART: &str =
    "holds a part of a table only: it was being filled from another server; name that one, too";
const OTHER: &str = "holds another table than the other servers";
const TWIN: &str = "holds the same copy as another server: one is a clone; empty it";
const FORGOTTEN: &str = "is no copy of this table any more: empty it, so that it is filled";
const SPLIT: &str = "has gone on without another server, and that one without it: name one of them only, or empty one";
const MISSING: &str = "holds a table, another copy of which may have gone on without it: name all servers and see to it \
    that they answer; or, if what others have may be lost, add `copies=` with the number of servers that are left";

/// Chooses the servers that count; `None`: there is no table. A server that holds nothing gets one of the numbers from `id`
/// on. Copies that count and do not answer are given up with `may_miss`.
///
/// # Errors
/// The server that cannot be used, and its defect.
pub(crate) fn choose(
    found: &[Option<FoundCopy>],
    id: u64,
    may_miss: bool,
) -> Result<Option<ChosenCopies>, (usize, &'static str)> {
    let there = || found.iter().enumerate().filter_map(|(at, copy)| Some((at, copy.as_ref()?)));
    let newest = there().max_by_key(|(at, copy)| (copy.record.generation(), found.len() - at));
    let Some((first, FoundCopy { record, closed_by })) = newest else { return Ok(None) };
    let generation = record.generation();
    if generation == 0 {
        return Err((first, PART));
    }
    let (mut members, mut is_clean) = (0, closed_by.is_some());
    for (at, copy) in there() {
        let (own, is_own) =
            (copy.record.generation(), |other: &SetRecord| other.own == copy.record.own);
        let is_split =
            |counted| own > counted || own == generation && copy.record.copies != record.copies;
        let refusal = match record.counted(copy.record.own) {
            _ if copy.record.table != record.table => OTHER,
            _ if there().filter(|(_, other)| is_own(&other.record)).count() > 1 => TWIN,
            None => FORGOTTEN,
            Some(counted) if is_split(counted) => SPLIT,
            Some(_) => {
                members |= Servers::from(own == generation) << at;
                is_clean &= own != generation || copy.closed_by == *closed_by;
                continue;
            }
        };
        return Err((at, refusal));
    }
    let set = || record.copies.iter().filter(|copy| copy.id != 0 && copy.counted == generation);
    let is_there = |copy: &CopyRecord| there().any(|(_, found)| found.record.own == copy.id);
    if !may_miss && !set().all(is_there) {
        return Err((first, MISSING));
    }
    let own = |(at, copy): (usize, &Option<FoundCopy>)| {
        let id = copy.map_or(id.wrapping_add(at as u64).max(1), |copy| copy.record.own);
        CopyRecord { id, counted: record.counted(id).unwrap_or(0) }
    };
    let is_other = |copy: &&CopyRecord| copy.id != 0 && !is_there(copy);
    let known =
        found.iter().enumerate().map(own).chain(record.copies.iter().filter(is_other).copied());
    let mut copies = CopyList::default();
    copies.iter_mut().zip(known).for_each(|(to, copy)| *to = copy);
    let members = if is_clean { members } else { 1 << first };
    Ok(Some(ChosenCopies { table: record.table, copies, members }))
}

/// The present set, as a word.
///
/// 63..16 the last generation that left a copy out | 15..8 whole copies | 7..0 members: whole, or joining
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SetWord(u64);

impl SetWord {
    fn new(left: u64, whole: Servers, members: Servers) -> SetWord {
        assert!(whole & !members == 0 && left < 1 << 48, "whole {whole:b} of {members:b}");
        SetWord(left << 16 | u64::from(whole) << 8 | u64::from(members))
    }

    fn members(self) -> Servers {
        self.0 as Servers
    }

    fn whole(self) -> Servers {
        (self.0 >> 8) as Servers
    }

    fn left(self) -> u64 {
        self.0 >> 16
    }
}

/// How far a write or a flush has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Agreed {
    /// All copies that count have it.
    Done,
    /// Not all have recorded yet that others are left out.
    Waiting,
    /// These miss it, and are to be left out.
    MissedBy(Servers),
    /// No whole copy has it.
    Lost,
}

/// See [module](self).
#[derive(Debug)]
pub(crate) struct TableCopies {
    word: AtomicU64,
    /// The generation that each server's mark records; 0: it is no member there.
    recorded: [AtomicU64; COPIES_MAX],
    list: Mutex<PresentList>,
}

#[derive(Debug, Default)]
struct PresentList {
    table: u64,
    copies: CopyList,
    /// 0: not begun.
    generation: u64,
    left_out: Servers,
}

impl TableCopies {
    pub(crate) fn new() -> TableCopies {
        TableCopies {
            word: AtomicU64::new(0),
            recorded: std::array::from_fn(|_| AtomicU64::new(0)),
            list: Mutex::default(),
        }
    }

    fn list(&self) -> MutexGuard<'_, PresentList> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn word(&self) -> SetWord {
        SetWord(self.word.load(Ordering::SeqCst))
    }

    /// Changes the set. With the lock: generations are recorded in their order.
    fn change(&self, list: &mut PresentList, is_left: bool, whole: Servers, members: Servers) {
        list.generation += 1;
        each(members).for_each(|at| list.copies[at].counted = list.generation);
        let left = if is_left { list.generation } else { self.word().left() };
        self.word.store(SetWord::new(left, whole, members).0, Ordering::SeqCst);
    }

    /// The next generation begins, with copies that have been chosen.
    pub(crate) fn begin(&self, chosen: &ChosenCopies) {
        let ChosenCopies { table, copies, members } = *chosen;
        let generation = copies.iter().map(|copy| copy.counted).max().unwrap_or(0);
        let mut list = self.list();
        *list = PresentList { table, copies, generation, left_out: 0 };
        self.change(&mut list, true, members, members);
    }

    /// Copies that each write must reach.
    pub(crate) fn members(&self) -> Servers {
        self.word().members()
    }

    /// Copies that have all that was written.
    pub(crate) fn whole(&self) -> Servers {
        self.word().whole()
    }

    /// The record that the server's mark is to have, and its generation.
    pub(crate) fn record_of(&self, at: usize) -> (u64, SetRecord) {
        let list = self.list();
        let mut copies = list.copies;
        let is_member = self.members() >> at & 1 == 1;
        if !is_member {
            copies[at].counted = 0;
        }
        let generation = if is_member { list.generation } else { 0 };
        (generation, SetRecord { table: list.table, own: copies[at].id, copies })
    }

    /// True if the server's mark is to be written now.
    pub(crate) fn is_record_due(&self, at: usize) -> bool {
        let generation = self.list().generation;
        let has_recorded = |at: usize| self.recorded[at].load(Ordering::SeqCst) == generation;
        let is_joining = self.recorded[at].load(Ordering::SeqCst) == 0;
        let members = self.members();
        let others = members & !(1 << at);
        members >> at & 1 == 1
            && !has_recorded(at)
            && (!is_joining || each(others).all(has_recorded))
    }

    /// The server's mark records a generation, durably. A copy that joins is whole from then on.
    pub(crate) fn note_recorded(&self, at: usize, generation: u64) {
        let _list = self.list();
        self.recorded[at].store(generation, Ordering::SeqCst);
        let (word, own) = (self.word(), 1 << at);
        if generation > 0 && word.members() & own != 0 {
            let word = SetWord::new(word.left(), word.whole() | own, word.members());
            self.word.store(word.0, Ordering::SeqCst);
        }
    }

    /// A copy that was filled becomes a member, unless it `lacks` something or was left out: then `None`. `Some(false)`: it
    /// lacks what was written meanwhile, and is to be left out.
    pub(crate) fn join(&self, at: usize, lacks: impl Fn() -> bool) -> Option<bool> {
        let mut list = self.list();
        if lacks() || list.generation == 0 || list.left_out >> at & 1 == 1 {
            return None;
        }
        let word = self.word();
        self.change(&mut list, false, word.whole(), word.members() | 1 << at);
        fence(Ordering::SeqCst); // Pairs with that in `agreed`: who writes without the copy sees it, or is seen here.
        Some(!lacks())
    }

    /// Leaves a copy out; returns whether it is, which the last whole one never is.
    pub(crate) fn leave(&self, at: usize) -> bool {
        let mut list = self.list();
        let (word, rest) = (self.word(), !(1 << at));
        let is_member = word.members() & !rest != 0;
        let is_last = is_member && word.whole() & rest == 0;
        if !is_last {
            list.left_out |= !rest;
        }
        if is_member && !is_last {
            self.change(&mut list, true, word.whole() & rest, word.members() & rest);
        }
        !is_last
    }

    /// True if all members have recorded that others are left out. One that joins has recorded nothing: nobody takes it for
    /// whole.
    pub(crate) fn is_settled(&self) -> bool {
        let word = self.word();
        let recorded = |at: usize| self.recorded[at].load(Ordering::SeqCst);
        !each(word.members()).any(|at| (1..word.left()).contains(&recorded(at)))
    }

    /// How far that has come which these servers have done. What the others lack is known.
    pub(crate) fn agreed(&self, done: Servers) -> Agreed {
        fence(Ordering::SeqCst); // Pairs with that in `join`.
        let word = self.word();
        match word.members() & !done {
            _ if word.whole() & done == 0 => Agreed::Lost,
            0 if self.is_settled() => Agreed::Done,
            0 => Agreed::Waiting,
            missed => Agreed::MissedBy(missed),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn copy(own: u64, copies: &[(u64, u64)], closed_by: Option<u64>) -> Option<FoundCopy> {
        let mut list = CopyList::default();
        list.iter_mut()
            .zip(copies)
            .for_each(|(to, (id, counted))| *to = CopyRecord { id: *id, counted: *counted });
        Some(FoundCopy { record: SetRecord { table: 1, own, copies: list }, closed_by })
    }

    fn members(found: &[Option<FoundCopy>]) -> Result<Servers, &'static str> {
        choose(found, 90, false)
            .map(|chosen| chosen.map_or(0, |chosen| chosen.members))
            .map_err(|(_, why)| why)
    }

    #[test]
    fn a_record_is_read_as_it_is_written() {
        for copies in [&[(5, 1)][..], &[(5, 3), (u64::MAX, 2), (7, 0), (8, 3)]] {
            let record = copy(5, copies, None).expect("a copy").record;
            let text = record.to_string();
            assert_eq!(
                SetRecord::parse(&text.split(' ').collect::<Vec<_>>()),
                Some(record),
                "{text}"
            );
        }
        for text in
            ["table 1 copy 5 of 5:1 6:1 7:1 8:1 9:1", "table 1 copy 5 of 5", "table 1 copy 5"]
        {
            assert_eq!(SetRecord::parse(&text.split(' ').collect::<Vec<_>>()), None, "{text}");
        }
    }

    #[test]
    fn who_counts_at_the_opening() {
        let (both, first) = ([(5, 3), (6, 3)], [(5, 4), (6, 3)]);
        let (a, b) = (copy(5, &both, Some(9)), copy(6, &both, Some(9)));
        let alone = copy(5, &first, Some(9));
        assert_eq!(members(&[None, None]), Ok(0), "no table");
        assert_eq!(members(&[a, b]), Ok(0b11));
        assert_eq!(members(&[b, a]), Ok(0b11), "in any order");
        assert_eq!(members(&[copy(5, &both, None), b]), Ok(0b01), "not closed");
        assert_eq!(members(&[a, copy(6, &both, Some(8))]), Ok(0b01), "closed by another run");
        assert_eq!(members(&[a]), Err(MISSING));
        assert_eq!(members(&[a, None]), Err(MISSING), "one that holds nothing does not tell");
        assert_eq!(choose(&[None, b], 90, true).map(|it| it.map(|it| it.members)), Ok(Some(0b10)));
        assert_eq!(members(&[b, alone]), Ok(0b10), "the other has gone on alone");
        assert_eq!(members(&[alone]), Ok(0b1), "it knows that nobody else counts");
        assert_eq!(members(&[alone, None]), Ok(0b1), "a new one is filled");
        assert_eq!(members(&[alone, copy(6, &[(5, 3), (6, 4)], Some(9))]), Err(SPLIT));
        assert_eq!(members(&[alone, copy(6, &[(5, 3), (6, 5)], Some(9))]), Err(SPLIT));
        let third = |own, counted| copy(own, &[(5, 4), (6, 4), (7, counted)], Some(9));
        assert_eq!(members(&[third(5, 4), third(6, 3), third(7, 4)]), Err(SPLIT), "others count");
        assert_eq!(members(&[alone, copy(7, &[(7, 2)], Some(9))]), Err(FORGOTTEN));
        assert_eq!(members(&[a, a]), Err(TWIN));
        assert_eq!(members(&[copy(6, &[(5, 3), (6, 0)], None)]), Err(PART));
        let other =
            a.map(|copy| FoundCopy { record: SetRecord { table: 2, ..copy.record }, ..copy });
        assert_eq!(members(&[other, b]), Err(OTHER));
    }

    #[test]
    fn new_copies_take_the_places_of_those_that_count_no_more() {
        let list = [(5, 4), (6, 3), (7, 2), (8, 1)];
        let chosen = choose(&[None, copy(5, &list, Some(9)), None], 90, false)
            .expect("chosen")
            .expect("a table");
        let ids: Vec<_> = chosen.copies.iter().map(|copy| (copy.id, copy.counted)).collect();
        assert_eq!((chosen.members, &ids[..]), (0b10, &[(90, 0), (5, 4), (92, 0), (6, 3)][..]));
    }
}

/// All histories of some servers, a client and its successors, up to a number of steps: of one block, whose content is the
/// number of the write that wrote it.
#[cfg(all(test, not(loom)))]
mod models {
    use super::*;

    /// The choices of one history, and those that were not taken yet.
    #[derive(Default)]
    struct Choices {
        taken: Vec<(usize, usize)>,
        next: usize,
    }

    impl Choices {
        fn pick(&mut self, of: usize) -> usize {
            if self.next == self.taken.len() {
                self.taken.push((0, of));
            }
            self.next += 1;
            assert_eq!(self.taken[self.next - 1].1, of, "a history repeats");
            self.taken[self.next - 1].0
        }

        /// Goes on to the next history, if there is one.
        fn turn(&mut self) -> bool {
            self.next = 0;
            while let Some((choice, of)) = self.taken.pop() {
                if choice + 1 < of {
                    self.taken.push((choice + 1, of));
                    return true;
                }
            }
            false
        }
    }

    #[derive(Clone, Copy, Default)]
    struct ModelServer {
        mark: Option<FoundCopy>,
        content: u64,
        /// A write that comes late.
        late: Option<u64>,
    }

    struct ModelClient {
        copies: TableCopies,
        run: u64,
        lacking: Servers,
        left_out: Servers,
        /// A write that waits for the set to be recorded, and who has done it.
        held: Option<(u64, Servers)>,
        is_unequal: bool,
        is_barred: bool,
    }

    #[derive(Clone, Copy)]
    enum Happening {
        Death,
        Write,
        Close,
        Record(usize),
        Fill(usize),
        Join(usize),
        Late(usize),
    }

    struct World {
        servers: Vec<ModelServer>,
        client: Option<ModelClient>,
        runs: u64,
        writes: u64,
        /// The last write that was reported, or read by who flushes it.
        promised: u64,
        openings: u64,
    }

    impl World {
        /// A table that is open, of which these copies count, and others are filled.
        fn new(servers: usize, members: Servers) -> World {
            let servers = vec![ModelServer::default(); servers];
            let mut world =
                World { servers, client: None, runs: 10, writes: 0, promised: 0, openings: 0 };
            let copies = std::array::from_fn(|at| CopyRecord {
                id: if at < world.servers.len() { at as u64 + 1 } else { 0 },
                counted: 0,
            });
            let taken = world.servers.len();
            world.take(&ChosenCopies { table: 1, copies, members }, taken);
            world
        }

        fn all(&self) -> Servers {
            (1 << self.servers.len()) - 1
        }

        fn mark(&mut self, at: usize, is_closed: bool) -> u64 {
            let client = self.client.as_ref().expect("a client");
            let (generation, record) = client.copies.record_of(at);
            let closed_by = is_closed.then_some(client.run);
            self.servers[at].mark = Some(FoundCopy { record, closed_by });
            generation
        }

        fn take(&mut self, chosen: &ChosenCopies, asked: usize) {
            self.runs += 1;
            let copies = TableCopies::new();
            copies.begin(chosen);
            self.client = Some(ModelClient {
                copies,
                run: self.runs,
                lacking: self.all() & !chosen.members,
                left_out: 0,
                held: None,
                is_unequal: false,
                is_barred: false,
            });
            for at in 0..asked {
                let generation = self.mark(at, false);
                self.client.as_mut().expect("a client").copies.note_recorded(at, generation);
            }
        }

        /// Somebody opens the table with some of the servers, and may die while it takes them.
        fn open(&mut self, choices: &mut Choices) {
            let asked = choices.pick(self.all().into()) as Servers + 1;
            // It waits for what comes late, which comes or not.
            for server in &mut self.servers {
                if let Some(late) = server.late.take()
                    && choices.pick(2) == 1
                {
                    server.content = late;
                }
            }
            let of = |at: usize| asked >> at & 1 == 1;
            // The servers in another order: those that are asked are the first.
            let order: Vec<usize> = (0..self.servers.len()).filter(|at| of(*at)).collect();
            let found: Vec<_> = order.iter().map(|at| self.servers[*at].mark).collect();
            let Ok(Some(chosen)) = choose(&found, 0, false) else { return };
            let whole: Vec<u64> =
                each(chosen.members).map(|at| self.servers[order[at]].content).collect();
            assert!(whole.iter().all(|content| *content == whole[0]), "copies differ: {whole:?}");
            assert!(
                whole[0] >= self.promised,
                "{} is promised, {} is there",
                self.promised,
                whole[0]
            );
            if order.len() < self.servers.len() {
                // Only to know that it is right: others are asked for what follows, but for one that goes on alone.
                if self.servers.len() > 2 {
                    return;
                }
                let rest = (0..self.servers.len()).find(|at| !of(*at)).expect("one is not asked");
                self.promised = whole[0];
                let mut apart: Vec<_> = self.servers.drain(rest..=rest).collect();
                let taken = self.servers.len();
                self.take(&chosen, taken);
                // It writes, and ends as it should.
                self.write_all();
                self.close();
                self.servers.splice(rest..rest, apart.drain(..));
                return;
            }
            self.openings += 1;
            let taken = choices.pick(self.servers.len() + 1);
            self.take(&chosen, taken);
            if taken < self.servers.len() {
                self.client = None;
            } else {
                self.promised = whole[0]; // It is read, and flushed.
            }
        }

        fn write_all(&mut self) {
            self.writes += 1;
            self.servers.iter_mut().for_each(|server| server.content = self.writes);
            self.promised = self.writes;
        }

        fn leave(&mut self, at: usize) {
            let client = self.client.as_mut().expect("a client");
            if client.copies.leave(at) {
                client.left_out |= 1 << at;
            }
        }

        /// A write: each server has it, misses it, or may get it late. The client may die before it has sent all.
        fn write(&mut self, choices: &mut Choices) {
            self.writes += 1;
            let (write, mut done, mut late) = (self.writes, 0, 0);
            for at in 0..self.servers.len() {
                let left_out = self.client.as_ref().expect("a client").left_out;
                if left_out >> at & 1 == 1 {
                    continue;
                }
                match choices.pick(4) {
                    0 => (self.servers[at].content, done) = (write, done | 1 << at),
                    1 => {}
                    2 => (self.servers[at].late, late) = (Some(write), late | 1 << at),
                    _ => return self.client = None,
                }
            }
            let (client, all) =
                (self.client.as_mut().expect("a client"), (1 << self.servers.len()) - 1);
            let whole = client.copies.whole();
            client.lacking &= !done;
            client.lacking |= !whole & if done & whole != 0 { !done } else { !0 } & all;
            for at in each(late & !client.copies.members()) {
                self.leave(at);
            }
            self.client.as_mut().expect("a client").held = Some((write, done));
            self.settle();
            let client = self.client.as_mut().expect("a client");
            client.is_barred |= late & client.copies.members() & !client.left_out != 0;
        }

        /// Ends a write, if nothing is to be recorded first.
        fn settle(&mut self) {
            let Some((write, done)) = self.client.as_ref().and_then(|client| client.held) else {
                return;
            };
            loop {
                let client = self.client.as_mut().expect("a client");
                match client.copies.agreed(done) {
                    Agreed::MissedBy(missed) => each(missed).for_each(|at| self.leave(at)),
                    Agreed::Waiting => return,
                    Agreed::Done => {
                        (client.held, self.promised) = (None, write);
                        return;
                    }
                    Agreed::Lost => {
                        (client.held, client.is_unequal) = (None, true);
                        return;
                    }
                }
            }
        }

        fn close(&mut self) {
            let Some(client) = &self.client else { return };
            let (members, left_out) = (client.copies.members(), client.left_out);
            let is_alone = members.is_power_of_two();
            let is_equal = is_alone || !client.is_unequal && members == client.copies.whole();
            for at in each(self.all() & !left_out) {
                if members >> at & 1 == 0 || is_equal {
                    self.mark(at, true);
                }
            }
            self.client = None;
        }

        /// One thing of those that may happen.
        fn step(&mut self, choices: &mut Choices) {
            let Some(client) = &self.client else { return self.open(choices) };
            let (copies, all) = (&client.copies, self.all());
            let is_idle = client.held.is_none() && !client.is_barred;
            let away = all & !copies.members() & !client.left_out;
            let of = |is_so: &dyn Fn(usize) -> bool| {
                (0..self.servers.len()).filter(|at| is_so(*at)).fold(0, |all, at| all | 1 << at)
            };
            let mut happenings = vec![Happening::Death];
            let mut may = |what: fn(usize) -> Happening, servers: Servers| {
                happenings.extend(each(servers).map(what))
            };
            may(|_| Happening::Write, Servers::from(is_idle));
            may(|_| Happening::Close, Servers::from(is_idle));
            may(Happening::Record, of(&|at| copies.is_record_due(at)));
            may(Happening::Fill, if client.held.is_none() { away & client.lacking } else { 0 });
            may(Happening::Join, all & !copies.members() & !client.lacking);
            may(Happening::Late, of(&|at| self.servers[at].late.is_some()));
            match happenings[choices.pick(happenings.len())] {
                Happening::Death => self.client = None,
                Happening::Write => self.write(choices),
                Happening::Close => self.close(),
                Happening::Record(at) => {
                    // If the client dies then, it does not know.
                    let generation = self.mark(at, false);
                    self.client.as_mut().expect("a client").copies.note_recorded(at, generation);
                    self.settle();
                }
                Happening::Fill(at) => {
                    let whole = each(copies.whole()).next().expect("one counts");
                    self.servers[at].content = self.servers[whole].content;
                    self.client.as_mut().expect("a client").lacking &= !(1 << at);
                }
                Happening::Join(at) => {
                    let is_left_out = client.left_out >> at & 1 == 1;
                    let joined = copies.join(at, || false);
                    assert_eq!(joined.is_none(), is_left_out, "a late write is not known of");
                }
                Happening::Late(at) => {
                    self.servers[at].content = self.servers[at].late.take().expect("it is late");
                }
            }
        }
    }

    fn run_all(servers: usize, members: Servers, steps: usize) -> (u64, u64) {
        let (mut choices, mut histories, mut openings) = (Choices::default(), 0, 0);
        loop {
            let mut world = World::new(servers, members);
            for _ in 0..steps {
                world.step(&mut choices);
            }
            // However it ends, the next opener finds what was promised.
            world.client = None;
            world.open(&mut choices);
            (histories, openings) = (histories + 1, openings + world.openings);
            if !choices.turn() {
                return (histories, openings);
            }
        }
    }

    #[test]
    fn no_opening_finds_less_than_was_promised() {
        for (servers, members, steps) in [(2, 0b11, 5), (2, 0b01, 5), (3, 0b111, 3), (3, 0b011, 3)]
        {
            let (histories, openings) = run_all(servers, members, steps);
            println!(
                "{members:b} of {servers} servers: {histories} histories, {openings} openings"
            );
            assert!(openings > 1000, "it shows nothing");
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::blocks::{BLOCK, BlockSet};
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn loom_a_copy_that_joins_has_what_was_reported_without_it() {
        loom::model(|| {
            let copies = TableCopies::new();
            let mut chosen = ChosenCopies { table: 1, copies: Default::default(), members: 0b01 };
            (chosen.copies[0], chosen.copies[1].id) = (CopyRecord { id: 1, counted: 1 }, 2);
            copies.begin(&chosen);
            let world = Arc::new((copies, BlockSet::new(BLOCK)));
            let other = Arc::clone(&world);
            let writer = thread::spawn(move || {
                let (copies, lacking) = &*other;
                lacking.insert(0, BLOCK);
                copies.agreed(0b01) == Agreed::Done
            });
            let (copies, lacking) = &*world;
            let joined = copies.join(1, || lacking.has_any(0, BLOCK));
            let is_reported = writer.join().expect("the writer");
            assert!(!(is_reported && joined == Some(true)), "it counts without what was written");
        });
    }
}
