//! System calls that read and write far memory: contents, and structures of the kernel's.

use crate::ground::{Ground, Stretch, attacks};
use crate::kernel::{
    Outcome, addr, addr_mut, call, content, fd, give, memory_file, pipe, socket_pair, take,
};
use libc::{c_long, iovec};

attacks! {
    contents_go_through_files_pipes_and_sockets: all,
    contents_go_through_a_pipe_without_copies: all,
    other_processes_calls_find_the_bytes: all,
    structures_of_the_kernel_lie_in_far_memory: all,
    futexes_work_on_far_words: all,
}

/// Where a call reads or writes.
#[derive(Clone, Copy, Debug)]
struct Spot {
    at: usize,
    len: usize,
    /// A place for structures, apart from the rest.
    side: usize,
}

type Row = (&'static str, fn(&Stretch, Spot) -> Outcome);

/// Bytes at the end of a stretch that are for structures.
const SIDE: usize = 16 << 10;
/// Longest content of one call: what the buffers of pipes and sockets take at once.
const LEN_MAX: usize = 48 << 10;

/// Makes every call of a table at random places.
fn go_through(ground: &Ground, table: &[Row], times: usize) {
    let mut dice = ground.dice();
    let room = (ground.far.len - SIDE) as u64;
    for _ in 0..ground.rounds(times) {
        for (name, act) in table {
            let len = 1 + dice.below(LEN_MAX as u64) as usize;
            let at = dice.below(room - len as u64) as usize;
            let side = room as usize + dice.below(SIDE as u64 / 2) as usize / 16 * 16;
            let spot = Spot { at, len, side };
            let _outcome = ground.same(name, |stretch| act(stretch, spot));
            ground.assert_alike_in(name, at..at + len);
            ground.assert_alike_in(name, side..side + SIDE / 2);
        }
    }
    ground.assert_alike("afterwards");
}

/// The outcome of a call that reports nothing but a number.
fn number(result: Result<usize, i32>) -> Outcome {
    result.map(|number| number.to_le_bytes().to_vec())
}

/// Bytes that depend on the spot only.
fn bytes_of(spot: Spot) -> Vec<u8> {
    (0..spot.len).map(|n| (n * 7 + spot.at * 13 + spot.len) as u8).collect()
}

/// Cuts a spot into a few parts, as vectors of a call.
fn vectors(stretch: &Stretch, spot: Spot) -> Vec<iovec> {
    let part = spot.len.div_ceil(7);
    let part_at = |from: usize| iovec {
        iov_base: stretch.at(spot.at + from) as *mut libc::c_void,
        iov_len: part.min(spot.len - from),
    };
    (0..spot.len).step_by(part).map(part_at).collect()
}

/// Runs `body` with a structure in the stretch; what was there before comes back.
fn with_side(
    stretch: &Stretch,
    spot: Spot,
    bytes: &[u8],
    body: impl FnOnce(usize) -> Outcome,
) -> Outcome {
    let before = stretch.bytes(spot.side..spot.side + bytes.len());
    stretch.put(spot.side, bytes);
    let outcome = body(stretch.at(spot.side));
    stretch.put(spot.side, &before);
    outcome
}

/// The vectors themselves lie in the stretch.
fn with_vectors(
    stretch: &Stretch,
    spot: Spot,
    body: impl FnOnce(usize, usize) -> Outcome,
) -> Outcome {
    let vectors = vectors(stretch, spot);
    let words: Vec<u8> = vectors
        .iter()
        .flat_map(|vector| [vector.iov_base as usize, vector.iov_len])
        .flat_map(usize::to_ne_bytes)
        .collect();
    with_side(stretch, spot, &words, |place| body(place, vectors.len()))
}

fn pwrite(stretch: &Stretch, spot: Spot) -> Outcome {
    let file = memory_file();
    call(libc::SYS_pwrite64, &[fd(&file), stretch.at(spot.at), spot.len, 0])?;
    Ok(content(&file, spot.len))
}

fn pread(stretch: &Stretch, spot: Spot) -> Outcome {
    let file = memory_file();
    give(&file, &bytes_of(spot));
    number(call(libc::SYS_pread64, &[fd(&file), stretch.at(spot.at), spot.len, 0]))
}

fn pwritev(stretch: &Stretch, spot: Spot) -> Outcome {
    let file = memory_file();
    with_vectors(stretch, spot, |place, count| {
        call(libc::SYS_pwritev, &[fd(&file), place, count, 0, 0])?;
        Ok(content(&file, spot.len))
    })
}

fn preadv2(stretch: &Stretch, spot: Spot) -> Outcome {
    let file = memory_file();
    give(&file, &bytes_of(spot));
    with_vectors(stretch, spot, |place, count| {
        number(call(libc::SYS_preadv2, &[fd(&file), place, count, 0, 0, 0]))
    })
}

fn pipe_write(stretch: &Stretch, spot: Spot) -> Outcome {
    let (out, into) = pipe();
    call(libc::SYS_write, &[fd(&into), stretch.at(spot.at), spot.len])?;
    Ok(take(&out, spot.len))
}

fn pipe_readv(stretch: &Stretch, spot: Spot) -> Outcome {
    let (out, into) = pipe();
    let bytes = bytes_of(spot);
    call(libc::SYS_write, &[fd(&into), addr(&bytes[..]), bytes.len()])?;
    with_vectors(stretch, spot, |place, count| {
        number(call(libc::SYS_readv, &[fd(&out), place, count]))
    })
}

/// Through a pipe that refers to the memory, into a file, at once.
fn vmsplice_and_splice(stretch: &Stretch, spot: Spot) -> Outcome {
    let (out, into) = pipe();
    let file = memory_file();
    let mut moved = 0;
    let taken = with_vectors(stretch, spot, |place, count| {
        number(call(libc::SYS_vmsplice, &[fd(&into), place, count, 0]))
    })?;
    while moved < usize::from_le_bytes(taken[..8].try_into().expect("a number")) {
        let args = [fd(&out), 0, fd(&file), 0, spot.len, 0];
        moved += call(libc::SYS_splice, &args)?;
    }
    Ok(content(&file, spot.len))
}

fn send(stretch: &Stretch, spot: Spot) -> Outcome {
    let (one, other) = socket_pair(libc::SOCK_STREAM);
    call(libc::SYS_sendto, &[fd(&one), stretch.at(spot.at), spot.len, 0, 0, 0])?;
    Ok(take(&other, spot.len))
}

fn receive(stretch: &Stretch, spot: Spot) -> Outcome {
    let (one, other) = socket_pair(libc::SOCK_DGRAM);
    let bytes = bytes_of(spot);
    call(libc::SYS_write, &[fd(&one), addr(&bytes[..]), bytes.len()])?;
    number(call(libc::SYS_recvfrom, &[fd(&other), stretch.at(spot.at), spot.len, 0, 0, 0]))
}

/// A message whose header, vectors, control data and content are all in the stretch.
fn message(
    stretch: &Stretch,
    spot: Spot,
    control: usize,
    body: impl FnOnce(usize) -> Outcome,
) -> Outcome {
    const HEADER: usize = size_of::<libc::msghdr>();
    let vectors = vectors(stretch, spot);
    let place = stretch.at(spot.side);
    let words: Vec<usize> = vectors.iter().flat_map(|v| [v.iov_base as usize, v.iov_len]).collect();
    let after_vectors = place + HEADER + words.len() * 8;
    // struct msghdr: name, its length, vectors, their number, control data, its length, flags.
    let header = [0, 0, place + HEADER, vectors.len(), after_vectors, control, 0];
    let mut bytes: Vec<u8> =
        header.iter().chain(&words).flat_map(|word| word.to_ne_bytes()).collect();
    bytes.resize(bytes.len() + control, 0);
    with_side(stretch, spot, &bytes, body)
}

fn send_message(stretch: &Stretch, spot: Spot) -> Outcome {
    let (one, other) = socket_pair(libc::SOCK_STREAM);
    message(stretch, spot, 0, |header| {
        call(libc::SYS_sendmsg, &[fd(&one), header, 0])?;
        Ok(take(&other, spot.len))
    })
}

/// The message carries the sender's identity, which the kernel puts into the control data.
fn receive_message(stretch: &Stretch, spot: Spot) -> Outcome {
    let (one, other) = socket_pair(libc::SOCK_DGRAM);
    let (level, option) = (libc::SOL_SOCKET as usize, libc::SO_PASSCRED as usize);
    call(libc::SYS_setsockopt, &[fd(&other), level, option, addr(&1_i32), 4])?;
    let bytes = bytes_of(spot);
    call(libc::SYS_write, &[fd(&one), addr(&bytes[..]), bytes.len()])?;
    message(stretch, spot, 64, |header| {
        let mut outcome = call(libc::SYS_recvmsg, &[fd(&other), header, 0])?.to_ne_bytes().to_vec();
        let control = spot.side + size_of::<libc::msghdr>() + vectors(stretch, spot).len() * 16;
        outcome.extend(stretch.bytes(control..control + 28));
        Ok(outcome)
    })
}

const CONTENTS: &[Row] = &[
    ("pwrite", pwrite),
    ("pread", pread),
    ("pwritev", pwritev),
    ("preadv2", preadv2),
    ("write to a pipe", pipe_write),
    ("readv from a pipe", pipe_readv),
    ("send", send),
    ("recvfrom", receive),
    ("sendmsg", send_message),
    ("recvmsg", receive_message),
];

fn contents_go_through_files_pipes_and_sockets(ground: &Ground) {
    go_through(ground, CONTENTS, 1);
}

fn contents_go_through_a_pipe_without_copies(ground: &Ground) {
    go_through(ground, &[("vmsplice and splice", vmsplice_and_splice)], 4);
}

/// Calls of other processes on this one's memory, made by this process.
fn process_copy(number_of_call: c_long, stretch: &Stretch, spot: Spot) -> Outcome {
    let mut local = bytes_of(spot);
    let own = iovec { iov_base: addr_mut(&mut local[..]) as *mut libc::c_void, iov_len: spot.len };
    let remote = vectors(stretch, spot);
    let pid = std::process::id() as usize;
    let args = [pid, addr(&own), 1, addr(&remote[..]), remote.len(), 0];
    call(number_of_call, &args)?;
    Ok(local)
}

fn process_vm_readv(stretch: &Stretch, spot: Spot) -> Outcome {
    process_copy(libc::SYS_process_vm_readv, stretch, spot)
}

fn process_vm_writev(stretch: &Stretch, spot: Spot) -> Outcome {
    process_copy(libc::SYS_process_vm_writev, stretch, spot)
}

fn other_processes_calls_find_the_bytes(ground: &Ground) {
    go_through(ground, &[("process_vm_readv", process_vm_readv)], 4);
    let write: &[Row] = &[("process_vm_writev", process_vm_writev)];
    // It writes as a device does, into pages that it holds.
    if ground.drops_busy_pages() {
        ground.pinned(|| go_through(ground, write, 4));
    } else {
        go_through(ground, write, 4);
    }
}

/// Calls with a structure in the stretch; what they write there is the same for both twins.
const STRUCTURES: &[Row] = &[
    ("fstat", |stretch, spot| {
        let null = std::fs::File::open("/dev/null").expect("a device");
        number(call(libc::SYS_fstat, &[fd(&null), stretch.at(spot.side)]))
    }),
    ("newfstatat by a far path", |stretch, spot| {
        with_side(stretch, spot, b"/proc/self/status\0", |path| {
            let mut stat = [0_u64; 32];
            number(call(libc::SYS_newfstatat, &[-100_isize as usize, path, addr_mut(&mut stat), 0]))
        })
    }),
    ("openat by a far path", |stretch, spot| {
        with_side(stretch, spot, b"/dev/zero\0", |path| {
            let file = call(libc::SYS_openat, &[-100_isize as usize, path, 0])?;
            drop(crate::kernel::owned(file));
            Ok(Vec::new())
        })
    }),
    ("uname", |stretch, spot| number(call(libc::SYS_uname, &[stretch.at(spot.side)]))),
    ("getcwd", |stretch, spot| number(call(libc::SYS_getcwd, &[stretch.at(spot.side), 4096]))),
    ("readlinkat", |stretch, spot| {
        let path = addr(c"/proc/self/exe");
        let args = [-100_isize as usize, path, stretch.at(spot.side), 4096];
        number(call(libc::SYS_readlinkat, &args))
    }),
    ("getrandom", |stretch, spot| {
        let before = stretch.bytes(spot.side..spot.side + 4096);
        let got = call(libc::SYS_getrandom, &[stretch.at(spot.side), 4096, 0]);
        let changed = stretch.bytes(spot.side..spot.side + 4096) != before;
        stretch.put(spot.side, &before);
        got.map(|n| vec![n as u8, changed as u8])
    }),
    ("clock_gettime and clock_nanosleep", |stretch, spot| {
        with_side(stretch, spot, &[0; 16], |time| {
            call(libc::SYS_clock_gettime, &[libc::CLOCK_REALTIME as usize, time])?;
            let absolute = libc::TIMER_ABSTIME as usize;
            let args = [libc::CLOCK_REALTIME as usize, absolute, time, time];
            number(call(libc::SYS_clock_nanosleep, &args))
        })
    }),
    ("ioctl", |stretch, spot| {
        let (out, into) = pipe();
        call(libc::SYS_write, &[fd(&into), addr("seven b"), 7])?;
        number(call(libc::SYS_ioctl, &[fd(&out), libc::FIONREAD as usize, stretch.at(spot.side)]))
    }),
    ("getsockopt", |stretch, spot| {
        let (one, _other) = socket_pair(libc::SOCK_STREAM);
        let (level, option) = (libc::SOL_SOCKET as usize, libc::SO_TYPE as usize);
        with_side(stretch, spot, &[0, 0, 0, 0, 4, 0, 0, 0], |value| {
            call(libc::SYS_getsockopt, &[fd(&one), level, option, value, value + 4])?;
            Ok(stretch.bytes(spot.side..spot.side + 8))
        })
    }),
    ("poll", |stretch, spot| {
        let (out, into) = pipe();
        call(libc::SYS_write, &[fd(&into), addr("x"), 1])?;
        let mut entry = (fd(&out) as i32).to_ne_bytes().to_vec();
        entry.extend([libc::POLLIN as u8, 0, 0, 0]);
        with_side(stretch, spot, &entry, |entries| {
            call(libc::SYS_poll, &[entries, 1, usize::MAX])?;
            Ok(stretch.bytes(spot.side + 6..spot.side + 8))
        })
    }),
    ("epoll_wait", epoll),
    ("rt_sigprocmask", |stretch, spot| {
        let how = libc::SIG_BLOCK as usize;
        with_side(stretch, spot, &[0; 16], |sets| {
            number(call(libc::SYS_rt_sigprocmask, &[how, sets, sets + 8, 8]))
        })
    }),
    ("sched_getaffinity", |stretch, spot| {
        number(call(libc::SYS_sched_getaffinity, &[0, 128, stretch.at(spot.side)]))
    }),
    ("getdents64", |stretch, spot| {
        let dir = std::fs::File::open("/").expect("a directory");
        number(call(libc::SYS_getdents64, &[fd(&dir), stretch.at(spot.side), 4096]))
    }),
    ("prctl", |stretch, spot| {
        number(call(libc::SYS_prctl, &[libc::PR_GET_NAME as usize, stretch.at(spot.side)]))
    }),
    ("mincore", |stretch, spot| {
        let code = epoll as *const () as usize & !4095;
        number(call(libc::SYS_mincore, &[code, 4096, stretch.at(spot.side)]))
    }),
];

fn epoll(stretch: &Stretch, spot: Spot) -> Outcome {
    let (out, into) = pipe();
    call(libc::SYS_write, &[fd(&into), addr("x"), 1])?;
    let set = crate::kernel::owned(call(libc::SYS_epoll_create1, &[0])?);
    let mut event = (libc::EPOLLIN as u32).to_ne_bytes().to_vec();
    event.extend(0x1234_5678_9ABC_DEF0_u64.to_ne_bytes());
    with_side(stretch, spot, &event, |place| {
        let add = libc::EPOLL_CTL_ADD as usize;
        call(libc::SYS_epoll_ctl, &[fd(&set), add, fd(&out), place])?;
        stretch.put(spot.side, &[0; 12]);
        call(libc::SYS_epoll_wait, &[fd(&set), place, 1, usize::MAX])?;
        Ok(stretch.bytes(spot.side..spot.side + 12))
    })
}

fn structures_of_the_kernel_lie_in_far_memory(ground: &Ground) {
    go_through(ground, STRUCTURES, 1);
}

/// `struct timespec` of a wait that ends soon.
fn soon() -> Vec<u8> {
    [0_u64, 10_000].iter().flat_map(|part| part.to_ne_bytes()).collect()
}

fn futex(stretch: &Stretch, spot: Spot, command: i32, args: [usize; 4]) -> Outcome {
    let [value, timeout, second, last] = args;
    let word = stretch.at(spot.at & !3);
    number(call(libc::SYS_futex, &[word, command as usize, value, timeout, second, last]))
}

const FUTEXES: &[Row] = &[
    ("FUTEX_WAIT for another value", |stretch, spot| {
        let value = !stretch.word(spot.at & !3) as u32 as usize;
        futex(stretch, spot, libc::FUTEX_WAIT, [value, 0, 0, 0])
    }),
    ("private FUTEX_WAIT for another value", |stretch, spot| {
        let value = !stretch.word(spot.at & !3) as u32 as usize;
        futex(stretch, spot, libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, [value, 0, 0, 0])
    }),
    ("FUTEX_WAIT until a far time", |stretch, spot| {
        let value = stretch.word(spot.at & !3) as u32 as usize;
        with_side(stretch, spot, &soon(), |time| {
            futex(stretch, spot, libc::FUTEX_WAIT, [value, time, 0, 0])
        })
    }),
    ("FUTEX_WAKE", |stretch, spot| futex(stretch, spot, libc::FUTEX_WAKE, [1, 0, 0, 0])),
    ("FUTEX_CMP_REQUEUE", |stretch, spot| {
        let value = stretch.word(spot.at & !3) as u32 as usize;
        let other = stretch.at(spot.side);
        futex(stretch, spot, libc::FUTEX_CMP_REQUEUE, [1, 1, other, value])
    }),
    ("FUTEX_WAKE_OP", |stretch, spot| {
        // Adds one to the second word.
        let add = (libc::FUTEX_OP_ADD << 28 | libc::FUTEX_OP_CMP_EQ << 24 | 1 << 12) as usize;
        let other = stretch.at(spot.side);
        futex(stretch, spot, libc::FUTEX_WAKE_OP, [1, 1, other, add])
    }),
];

fn futexes_work_on_far_words(ground: &Ground) {
    go_through(ground, FUTEXES, 2);
}
