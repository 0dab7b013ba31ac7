//! The MPI backend gives the bits of the local backend, however its ranks lie on hosts.

use std::hash::{DefaultHasher, Hash, Hasher};

use candle_comm::{ProcessGroup, ReduceOp, launch};
use candle_core::{DType, Device, Result, Tensor};
use safetensors::View;

use crate::conformance::ops;
use crate::mpi::conforms;
use crate::mpirun::{run, run_on_hosts};
use crate::reference::{DTYPES, Random};

/// Any bits: numbers of all sizes, infinities, NaNs; integers that overflow.
pub fn any_bits(seed: u64, rank: usize, dims: &[usize], dtype: DType) -> Result<Tensor> {
    let mut random = Random::new(seed * 1000 + rank as u64);
    let num_elements: usize = dims.iter().product();
    let bytes = (0..num_elements * dtype.size_in_bytes()).map(|_| (random.next() >> 8) as u8);
    Tensor::from_raw_buffer(&bytes.collect::<Vec<u8>>(), dtype, dims, &Device::Cpu)
}

/// The bytes of a tensor.
pub fn raw(xs: &Tensor) -> Result<Vec<u8>> {
    Ok(xs.data().into_owned())
}

fn hash(xs: &Tensor) -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    raw(xs)?.hash(&mut hasher);
    Ok(hasher.finish())
}

/// As [`hash`], of what was computed: which bits a NaN has then is not defined.
fn hash_reduced(xs: &Tensor) -> Result<u64> {
    if !xs.dtype().is_float() {
        return hash(xs);
    }
    let is_nan = xs.ne(xs)?;
    let numbers = is_nan.where_cond(&xs.zeros_like()?, xs)?;
    Ok(hash(&numbers)? ^ hash(&is_nan)?.rotate_left(1))
}

/// Of what the root alone has; 0 for the others.
fn hash_of_root(xs: Option<Tensor>) -> Result<Option<u64>> {
    let xs = xs.as_ref();
    xs.map_or(Ok(Some(0)), |xs| hash_reduced(xs).map(Some))
}

/// What all results of one rank hash to.
fn all_operations(world: &ProcessGroup, len: usize, dtype: DType) -> Result<Vec<u64>> {
    let n = world.world_size();
    let mut results = Vec::new();
    let xs = any_bits(1, world.rank(), &[n * len, 3], dtype)?;
    for op in ops(dtype) {
        results.extend(hash_of_root(world.reduce(&xs, n / 2, op)?)?);
        results.push(hash_reduced(&world.all_reduce(&xs, op)?)?);
        results.push(hash_reduced(&world.reduce_scatter(&xs, op, 0)?)?);
        let whole = xs.force_contiguous()?;
        world.start_all_reduce_in_place(&whole, op)?.wait()?;
        results.push(hash_reduced(&whole)?);
        let whole = xs.force_contiguous()?;
        world.start_reduce_scatter_in_place(&whole, op)?.wait()?;
        results.push(hash_reduced(&whole)?);
    }
    results.push(hash(&world.all_gather(&xs, 1)?)?);
    let whole = xs.force_contiguous()?;
    world.start_all_gather_in_place(&whole)?.wait()?;
    results.push(hash(&whole)?);
    results.push(hash(&world.all_to_all(&xs, 0)?)?);
    results.push(hash(&world.broadcast(&xs, n - 1)?)?);
    results.push(hash(&world.broadcast(&xs, 0)?)?);
    let sizes: Vec<usize> = (0..n).map(|rank| (rank + 1) % 3 * len).collect();
    let mine = any_bits(2, world.rank(), &[sizes[world.rank()], 3], dtype)?;
    let all = world.gather(&mine, &sizes, n / 2, 0)?;
    let whole = all.clone().unwrap_or(mine);
    results.extend(hash_of_root(all)?);
    results.push(hash(&world.scatter(&whole, &sizes, n / 2, 0)?)?);
    Ok(results)
}

/// In all groups and sizes: about the most that a first message holds, and about and above the most of any other.
fn all_groups(world: &ProcessGroup) -> Result<Vec<u64>> {
    let (rank, n) = (world.rank(), world.world_size());
    let backwards = world.split(usize::from(rank % 3 == 1), n - rank)?;
    let part = world.split(usize::from(rank < n / 2), rank)?;
    let mut results = Vec::new();
    let few = [DType::F32, DType::BF16];
    for (group, dtypes) in [(world, &DTYPES[..]), (&backwards, &few), (&part, &few)] {
        for dtype in dtypes {
            let inline = 2048 / (3 * group.world_size() * dtype.size_in_bytes());
            for len in [inline, inline + 1] {
                results.extend(all_operations(group, len, *dtype)?);
            }
        }
        for dtype in few {
            let chunk = (512 << 10) / (3 * dtype.size_in_bytes());
            results.extend(all_operations(
                group,
                chunk / group.world_size() + 1,
                dtype,
            )?);
        }
    }
    results.extend(all_operations(world, 100_001, DType::BF16)?);
    results.extend(all_operations(world, 50_003, DType::F32)?);
    Ok(results)
}

/// Whether this rank's results are those of its thread in a world of threads.
fn check(world: &ProcessGroup) -> Result<()> {
    let got = all_groups(world)?;
    let expected = match world.rank() {
        0 => launch::threads(world.world_size(), |world| all_groups(&world))?,
        _ => Vec::new(),
    };
    let expected: Vec<u8> = expected
        .concat()
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let expected = world.all_gather_bytes(&expected)?.swap_remove(0);
    assert_eq!(expected.len(), 8 * got.len() * world.world_size());
    let mut expected = expected.chunks(8 * got.len()).skip(world.rank());
    let expected = expected.next().unwrap_or_default().chunks(8);
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!(got.to_le_bytes() == expected, "operation {index}");
    }
    Ok(())
}

#[test]
fn on_one_host() {
    run("mpi_bits::on_one_host", 4, |world| check(&world));
}

#[test]
fn five_ranks_two_per_host() {
    let test = "mpi_bits::five_ranks_two_per_host";
    run_on_hosts(test, (5, 2), |world| check(&world));
}

#[test]
fn six_ranks_three_per_host() {
    let test = "mpi_bits::six_ranks_three_per_host";
    run_on_hosts(test, (6, 3), |world| check(&world));
}

#[test]
fn seven_ranks_four_per_host() {
    let test = "mpi_bits::seven_ranks_four_per_host";
    run_on_hosts(test, (7, 4), |world| check(&world));
}

#[test]
fn five_ranks_on_hosts_conform() {
    let test = "mpi_bits::five_ranks_on_hosts_conform";
    run_on_hosts(test, (5, 2), |world| conforms(&world));
}

/// An even number: operations of two groups are in flight together.
#[test]
fn four_ranks_on_hosts_conform() {
    let test = "mpi_bits::four_ranks_on_hosts_conform";
    run_on_hosts(test, (4, 3), |world| conforms(&world));
}

/// The most memory that this process has had, in KiB.
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    peak.unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap()
}

/// Operations in place work in the caller's memory and in some messages', not in a copy of it.
#[test]
fn in_place_needs_little_memory() {
    let test = "mpi_bits::in_place_needs_little_memory";
    run_on_hosts(test, (4, 2), |world| {
        let n = world.world_size();
        let whole = Tensor::ones(96 << 18, DType::F32, &Device::Cpu)?;
        let small = Tensor::ones(6 << 18, DType::F32, &Device::Cpu)?;
        for _ in 0..3 {
            world
                .start_all_reduce_in_place(&small, ReduceOp::Max)?
                .wait()?;
        }
        let before = peak_kib();
        world
            .start_all_reduce_in_place(&whole, ReduceOp::Sum)?
            .wait()?;
        world
            .start_reduce_scatter_in_place(&whole, ReduceOp::Sum)?
            .wait()?;
        world.start_all_gather_in_place(&whole)?.wait()?;
        let more = peak_kib() - before;
        assert!(more < 32 << 10, "{more} KiB more for 96 MiB in place");
        // The measure sees a copy where there is one, less the messages that the peak before had.
        let copy = world.all_reduce(&whole, ReduceOp::Max)?;
        let copied = peak_kib() - before;
        assert!(copied >= (96 - 32) << 10, "{copied} KiB more for a copy");
        assert!(
            raw(&whole)?
                .chunks(4)
                .all(|x| x == ((n * n) as f32).to_le_bytes())
        );
        assert_eq!(copy.elem_count(), whole.elem_count());
        Ok(())
    });
}
