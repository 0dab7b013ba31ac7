//! Messages between ranks, over threads and over connections.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use candle_comm::{Departure, Mail, Mailbox, MailboxConfig, Received, sum_in_order};
use candle_core::{DType, Device, Tensor};
use candle_launch::{Control, ControlConfig, WaitNotices};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Over {
    Threads,
    Connections,
}

pub const BOTH: [Over; 2] = [Over::Threads, Over::Connections];

pub fn config() -> MailboxConfig {
    MailboxConfig {
        deadline: Duration::from_secs(20),
        ..MailboxConfig::default()
    }
}

pub fn control_config(rank: usize, world_size: usize, port: u16) -> ControlConfig {
    ControlConfig {
        rank,
        world_size,
        host: format!("host-{rank}"),
        master: ("127.0.0.1".into(), port),
        is_one_host: true,
        secret: "secret".into(),
        is_guessable: false,
        fingerprint: Vec::new(),
        cannot_start: None,
        join_timeout: Duration::from_secs(20),
        wait_notices: WaitNotices::default(),
        deadline: Duration::from_secs(20),
        rank_timeout: Duration::from_secs(6),
        ends_process: false,
    }
}

/// Connects ranks as processes are, the first `num_serving` with all.
pub fn connected(world_size: usize, num_serving: usize, config: &MailboxConfig) -> Vec<Mailbox> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut listener = Some(listener);
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..world_size)
            .map(|rank| {
                let listener = listener.take();
                scope.spawn(move || {
                    let of_control = control_config(rank, world_size, port);
                    let control = Control::join_at(&of_control, listener).unwrap();
                    let streams = control.connect_peers(num_serving).unwrap();
                    let mailbox = Mailbox::of_process(rank, streams, config).unwrap();
                    control.leave().unwrap();
                    mailbox
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

pub fn boxes<const N: usize>(over: Over, config: &MailboxConfig) -> [Mailbox; N] {
    let boxes = match over {
        Over::Threads => Mailbox::of_threads(N, config),
        Over::Connections => connected(N, N, config),
    };
    boxes.try_into().ok().unwrap()
}

pub fn numbers(values: &[f32]) -> Tensor {
    Tensor::new(values, &Device::Cpu).unwrap()
}

pub fn mail(received: Received) -> Mail {
    match received {
        Received::Mail(mail) => mail,
        Received::Left(departure) => panic!("expected a message, {departure}"),
    }
}

pub fn left(received: Received) -> Departure {
    match received {
        Received::Left(departure) => departure,
        Received::Mail(mail) => panic!(
            "expected a departure, got tag {} of {}",
            mail.tag, mail.from
        ),
    }
}

#[test]
fn tensors_of_all_types_and_shapes_arrive_as_they_were() {
    for over in BOTH {
        let [zero, one] = boxes(over, &config());
        let values = [-0.5f32, f32::NAN, f32::INFINITY, -0.0, 3e-40, 7.0];
        let xs = numbers(&values).reshape((2, 3)).unwrap();
        let integers = Tensor::new(&[[0u32, 1], [u32::MAX, 7]], &Device::Cpu).unwrap();
        let dtypes = [DType::F64, DType::BF16, DType::F16];
        let mut sent = vec![
            xs.clone(),
            integers,
            xs.get(1).unwrap(),
            xs.narrow(0, 0, 0).unwrap(),
        ];
        sent.push(xs.sum_all().unwrap());
        sent.extend(dtypes.map(|dtype| xs.to_dtype(dtype).unwrap()));
        one.send(0, 3, &sent).unwrap();
        one.send(0, 4, &[]).unwrap();
        let got = mail(zero.recv(Some(1), Some(3)).unwrap());
        assert_eq!((got.from, got.tag, got.tensors.len()), (1, 3, sent.len()));
        for (got, sent) in got.tensors.iter().zip(&sent) {
            assert_eq!(
                (got.dims(), got.dtype()),
                (sent.dims(), sent.dtype()),
                "{over:?}"
            );
            assert_eq!(bits(got), bits(sent), "{over:?}");
        }
        assert!(mail(zero.recv(None, None).unwrap()).tensors.is_empty());
        let transposed = xs.t().unwrap();
        let error = one.send(0, 3, &[transposed]).unwrap_err().to_string();
        assert!(error.contains("contiguous"), "{error}");
        assert!(one.send(0, 1 << 63, &[]).is_err());
        assert!(one.send(1, 0, &[]).is_err() && one.send(2, 0, &[]).is_err());
        one.leave();
        zero.leave();
    }
}

fn bits(xs: &Tensor) -> Vec<u64> {
    let xs = xs.flatten_all().unwrap().to_dtype(DType::F64).unwrap();
    let values = xs.to_vec1::<f64>().unwrap();
    values.into_iter().map(f64::to_bits).collect()
}

#[test]
fn messages_of_one_sender_and_tag_come_in_order_and_tags_wait_for_each_other_never() {
    for over in BOTH {
        let [zero, one] = boxes(over, &config());
        for number in 0..100u64 {
            one.send(0, number % 3, &[numbers(&[number as f32])])
                .unwrap();
        }
        for tag in [2, 0, 1] {
            for number in (tag..100).step_by(3) {
                let got = mail(zero.recv(Some(1), Some(tag)).unwrap());
                assert_eq!(got.tensors[0].to_vec1::<f32>().unwrap(), [number as f32]);
            }
        }
        assert!(
            zero.recv_timeout(None, None, Duration::ZERO)
                .unwrap()
                .is_none()
        );
        let begun = Instant::now();
        let limit = Duration::from_millis(30);
        assert!(zero.recv_timeout(Some(1), None, limit).unwrap().is_none());
        assert!(begun.elapsed() >= limit);
        one.leave();
        zero.leave();
    }
}

#[test]
fn who_receives_from_any_takes_what_came_first_whoever_sends_much() {
    for over in BOTH {
        let [zero, noisy, quiet] = boxes(over, &config());
        (0..50).for_each(|_| noisy.send(0, 0, &[]).unwrap());
        // What a sender has sent before a message with another tag is there when that one is.
        let here = |from: &Mailbox| {
            from.send(0, 1, &[]).unwrap();
            mail(zero.recv(Some(from.rank()), Some(1)).unwrap());
        };
        here(&noisy);
        quiet.send(0, 0, &[]).unwrap();
        here(&quiet);
        // It comes after the 50 that came before it, however much more there is by then.
        (0..50).for_each(|_| noisy.send(0, 0, &[]).unwrap());
        let mut seen = 0;
        while mail(zero.recv(None, None).unwrap()).from != 2 {
            seen += 1;
        }
        assert_eq!(seen, 50, "{over:?}");
        drop((noisy, quiet));
    }
}

#[test]
fn many_senders_at_once() {
    const SENDERS: usize = 12;
    for over in BOTH {
        let boxes = match over {
            Over::Threads => Mailbox::of_threads(SENDERS + 2, &config()),
            Over::Connections => connected(SENDERS + 2, 2, &config()),
        };
        let mut boxes = boxes.into_iter();
        let servers = [boxes.next().unwrap(), boxes.next().unwrap()];
        thread::scope(|scope| {
            for worker in boxes {
                scope.spawn(move || {
                    for round in 0..20 {
                        let value = numbers(&[worker.rank() as f32, round as f32]);
                        for server in 0..2 {
                            worker
                                .send(server, 1, std::slice::from_ref(&value))
                                .unwrap();
                        }
                        for server in 0..2 {
                            let echo = mail(worker.recv(Some(server), None).unwrap());
                            assert_eq!(bits(&echo.tensors[0]), bits(&value));
                        }
                    }
                    if over == Over::Connections {
                        // Workers are connected with those that serve only.
                        assert_eq!(worker.peers(), [0, 1]);
                    }
                    worker.leave();
                });
            }
            for server in servers {
                scope.spawn(move || {
                    let mut num_left = 0;
                    while num_left < SENDERS {
                        match server.recv(None, Some(1)).unwrap() {
                            Received::Mail(mail) => {
                                server.send(mail.from, 2, &mail.tensors).unwrap()
                            }
                            Received::Left(departure) => {
                                assert_eq!(departure.why, None);
                                num_left += 1;
                            }
                        }
                    }
                    server.leave();
                });
            }
        });
    }
}

#[test]
fn who_sends_more_than_is_received_waits() {
    let config = MailboxConfig {
        inbox_bytes: 1 << 20,
        ..config()
    };
    for over in BOTH {
        let [zero, one] = boxes(over, &config);
        let num_sent = AtomicUsize::new(0);
        thread::scope(|scope| {
            let (one, num_sent) = (&one, &num_sent);
            scope.spawn(move || {
                // 256 MiB, of a size that kernels do not buffer.
                let value = Tensor::ones(4 << 20, DType::F32, &Device::Cpu).unwrap();
                for _ in 0..16 {
                    one.send(0, 0, std::slice::from_ref(&value)).unwrap();
                    num_sent.fetch_add(1, Ordering::Relaxed);
                }
            });
            thread::sleep(Duration::from_millis(300));
            // One in the inbox, and one that may be on its way.
            assert!(num_sent.load(Ordering::Relaxed) <= 2, "{over:?}");
            for num_received in 0..16 {
                // It never holds more than that.
                let num_sent = num_sent.load(Ordering::Relaxed);
                assert!(num_sent <= num_received + 2, "{over:?}: {num_sent}");
                let got = mail(zero.recv(Some(1), None).unwrap());
                assert_eq!(
                    got.tensors[0]
                        .sum_all()
                        .unwrap()
                        .to_scalar::<f32>()
                        .unwrap(),
                    (4 << 20) as f32
                );
            }
        });
        one.leave();
        zero.leave();
    }
}

#[test]
fn who_is_not_received_from_has_a_deadline() {
    let config = MailboxConfig {
        inbox_bytes: 1 << 10,
        deadline: Duration::from_millis(300),
        ..MailboxConfig::default()
    };
    for over in BOTH {
        let [zero, one] = boxes(over, &config);
        let value = Tensor::ones(4 << 20, DType::F32, &Device::Cpu).unwrap();
        let begun = Instant::now();
        let sent: Result<Vec<()>, _> = (0..4)
            .map(|_| one.send(0, 0, std::slice::from_ref(&value)))
            .collect();
        let error = sent.unwrap_err().to_string();
        assert!(
            error.contains("rank 1 cannot send a message to rank 0"),
            "{error}"
        );
        assert!(begun.elapsed() < Duration::from_secs(10), "{over:?}");
        match (over, one.recv(Some(0), None)) {
            // It may still take what comes.
            (Over::Threads, Err(error)) => {
                let expected = "rank 1 has waited 0.3 s for a message from rank 0";
                assert!(error.to_string().starts_with(expected), "{error}");
            }
            // A part of a message is on the way: nothing can follow.
            (Over::Connections, Ok(Received::Left(departure))) => {
                assert_eq!((departure.rank, departure.why.is_some()), (0, true));
            }
            (over, got) => panic!("{over:?}: {:?}", got.map(drop)),
        }
        drop((zero, one));
    }
}

#[test]
fn a_message_of_300_mib() {
    let [zero, one] = boxes(Over::Connections, &config());
    let len = 75 << 20;
    zero.bound_tensors(300 << 20);
    let value = Tensor::arange(0u32, len, &Device::Cpu).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| one.send(0, 0, std::slice::from_ref(&value)).unwrap());
        let got = mail(zero.recv(Some(1), None).unwrap());
        assert!(got.tensors[0].to_vec1::<u32>().unwrap() == value.to_vec1::<u32>().unwrap());
    });
    one.leave();
    zero.leave();
}

#[test]
fn a_group_of_mailboxes_gives_the_bits_of_threads() {
    let input = |rank: usize| {
        let values = (0..37).map(|i| ((i * 7 + rank * 13) as f32).sin() * 1e3);
        Tensor::from_iter(values, &Device::Cpu).unwrap()
    };
    let all = |group: candle_comm::ProcessGroup, rank: usize| {
        let xs = input(rank);
        let sum = group.all_reduce(&xs, candle_comm::ReduceOp::Sum)?;
        let gathered = group.all_gather(&xs, 0)?;
        let pair = group.split(rank % 2, rank)?;
        let of_pair = pair.all_reduce(&xs, candle_comm::ReduceOp::Max)?;
        let first = group.broadcast(&xs, 2)?;
        let said = group.all_gather_bytes(format!("rank {rank}").as_bytes())?;
        let place = Tensor::zeros(4 * 37, DType::F32, &Device::Cpu)?;
        place.slice_set(&xs, 0, 37 * group.rank())?;
        let in_place = group.start_all_gather_in_place(&place)?.wait()?;
        assert_eq!(bits(&in_place), bits(&gathered));
        Ok(([sum, gathered, of_pair, first].map(|xs| bits(&xs)), said))
    };
    let expected = candle_comm::launch::threads(4, |world| {
        let rank = world.rank();
        all(world, rank)
    });
    let expected = expected.unwrap();
    let inputs: Vec<Tensor> = (0..4).map(input).collect();
    assert_eq!(bits(&sum_in_order(&inputs).unwrap()), expected[0].0[0]);
    for over in BOTH {
        let boxes: [Mailbox; 4] = boxes(over, &config());
        let got: Vec<_> = thread::scope(|scope| {
            let ranks = boxes.map(|mailbox| {
                scope.spawn(move || {
                    let mailbox = Arc::new(mailbox);
                    let group = mailbox.group(&[0, 1, 2, 3])?;
                    let all = all(group, mailbox.rank());
                    mailbox.leave();
                    all
                })
            });
            ranks.map(|rank| rank.join().unwrap().unwrap()).into()
        });
        assert_eq!(got, expected, "{over:?}");
    }
}
