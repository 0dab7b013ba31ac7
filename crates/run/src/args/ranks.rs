//! How a program runs its ranks: what moves their tensors, where these are, how long one may wait for another.

use std::time::Duration;

use candle_comm::{Backend, Degrees, HalfSums, RankEnv, RunConfig};
use candle_core::{Device, Result, bail};
use candle_launch::StartedBy;
use candle_ops::{DeviceChoice, GpuSettings, MatmulPrecision, ProductChoice};
use clap::Args;
use serde::Serialize;

use crate::args::choices::some_by_name;
use crate::args::number::whole;
use crate::args::text::{some_text, text};
use crate::memory::counting_allocator::{
    allocated_bytes, measure_activations_by, rank_allocated_bytes,
};
use crate::output::print_note;

/// Flags about ranks.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct RankArgs {
    /// What moves tensors between ranks: local, all ranks are threads of this process; mpi or nccl, each rank is a process
    /// that a launcher started [default: local; for one of several processes nccl on GPUs, else mpi]
    #[arg(long, value_name = "BACKEND")]
    #[serde(serialize_with = "some_text")]
    pub backend: Option<Backend>,
    /// cpu; cuda, all GPUs, which the ranks of a host take in turn; or cuda:N, the GPU of that number for all ranks [default:
    /// cuda if this program was built with it and a GPU answers, else cpu]
    #[arg(long, value_name = "DEVICE")]
    #[serde(serialize_with = "some_text")]
    pub device: Option<DeviceChoice>,
    /// With processes: compare each collective on all its ranks, by way of rank 0, before it starts. local and mpi find ranks that
    /// call different things without it, nccl does not; steps take longer
    #[arg(long)]
    pub check_collectives: bool,
    /// How nccl adds bf16 and f16: f32, sent as f32 and rounded once; or native, sent as they are, half the bytes, and rounded after
    /// each addition. local and mpi always send them as they are and add them in f32
    #[arg(long, default_value_t = HalfSums::F32, value_name = "PRECISION")]
    #[serde(serialize_with = "text")]
    pub half_sums: HalfSums,
    /// On a GPU: the same bits in each run. cuDNN's backward pass of attention then adds in a fixed order, which takes longer and
    /// more memory; everything else always does
    #[arg(long)]
    pub deterministic: bool,
    /// How linear layers multiply in f32, as in torch.set_float32_matmul_precision; not for --dtype bf16 or f16. On a CPU the environment
    /// variable CANDLE_TRAIN_PRODUCTS (fma, dots, 2 or 3) goes before it [default: highest]
    #[arg(long, value_name = "PRECISION")]
    #[serde(serialize_with = "some_by_name")]
    pub matmul_precision: Option<MatmulPrecision>,
    /// How long a rank may wait for the others in one operation before the run ends with a report
    #[arg(long, default_value_t = 600, value_name = "SECONDS", value_parser = whole::<u64>(1..=604_800))]
    pub deadline: u64,
    /// With processes: how long a rank may say nothing before it is taken for dead and the run ends. Ranks say that they live several
    /// times a second, whatever they compute; one that is stopped or swaps, or whose network is cut, does not
    #[arg(long, default_value_t = 6, value_name = "SECONDS", value_parser = whole::<u64>(1..=86_400))]
    pub rank_timeout: u64,
}

impl RankArgs {
    /// How this process takes part in a run with these degrees, which are not 0. Settles how its memory is counted if the program's allocator is [`ALLOCATOR`](crate::ALLOCATOR).
    ///
    /// # Errors
    /// A backend, device or number of processes that do not fit; an environment variable that means nothing.
    pub fn config(&self, degrees: Degrees) -> Result<RunConfig> {
        GpuSettings::get()?;
        ProductChoice::from_env()?;
        let env = RankEnv::from_env().map_err(candle_core::Error::wrap)?;
        let is_alone = env.world_size() == 1 && self.backend.is_none_or(|b| b == Backend::Local);
        let is_first = env.rank() == 0;
        let devices = match (is_alone, self.backend) {
            (true, _) => {
                let num_ranks = degrees.world_size().unwrap_or(usize::MAX);
                self.open(is_first, |choice| choice.open_for(num_ranks))?
            }
            (false, Some(Backend::Mpi)) => self.cpu_for_mpi()?,
            (false, _) => self.open(is_first, |choice| {
                Ok(vec![choice.open_for_process(env.local_rank())?])
            })?,
        };
        let on_gpus = devices.iter().any(Device::is_cuda);
        let backend = self
            .backend
            .unwrap_or_else(|| Backend::preferred(&env, on_gpus));
        if backend == Backend::Nccl && backend.is_built() && !on_gpus {
            bail!(
                "the backend nccl works on GPUs, and this rank is on the CPU\nhint: --device cuda, or --backend mpi"
            );
        }
        if self.check_collectives && backend == Backend::Local {
            bail!(
                "--check-collectives is given for ranks that are threads, which find what it looks for without it\nhint: leave it out"
            );
        }
        if self.half_sums == HalfSums::Native && backend != Backend::Nccl {
            bail!(
                "--half-sums native is given with the backend {backend}, which adds bf16 and f16 in f32 always\nhint: leave it out, or use --backend nccl"
            );
        }
        let config = RunConfig::new(backend, env, degrees, devices)?;
        // A rank that has its process for itself may allocate and free on all of its threads.
        measure_activations_by(match (backend, degrees.world_size()) {
            (Backend::Local, Some(2..)) => rank_allocated_bytes,
            _ => allocated_bytes,
        });
        Ok(RunConfig {
            deadline: Duration::from_secs(self.deadline),
            rank_timeout: Duration::from_secs(self.rank_timeout),
            check_collectives: self.check_collectives,
            half_sums: self.half_sums,
            ..config
        })
    }

    /// Whether this process was started by `candle-train launch`, which must start it through mpirun: it is to end with
    /// [`NEEDS_MPI_EXIT_CODE`](candle_launch::NEEDS_MPI_EXIT_CODE) then.
    ///
    /// # Errors
    /// An environment variable that means nothing.
    pub fn needs_mpi(&self) -> Result<bool> {
        let env = RankEnv::from_env().map_err(candle_core::Error::wrap)?;
        let is_ours = env.world_size() > 1 && env.started_by() == StartedBy::CandleTrain;
        if !is_ours || !Backend::Mpi.is_built() {
            return Ok(false);
        }
        let on_gpu = || match self.device {
            Some(device) => device != DeviceChoice::Cpu,
            // One that cannot be used leaves the rank on the CPU.
            None => {
                let device = DeviceChoice::preferred().open_for_process(env.local_rank());
                device.is_ok_and(|device| device.is_cuda())
            }
        };
        let backend = self.backend;
        let backend = backend.unwrap_or_else(|| Backend::preferred(&env, on_gpu()));
        Ok(backend == Backend::Mpi)
    }

    /// Makes this rank compute as the flags say: for each rank, before it does anything else.
    pub fn settle(&self) {
        GpuSettings::make_deterministic(self.deterministic);
        self.matmul_precision().set();
    }

    /// As [`Self::config`] for ranks that have nothing between them but messages, with so many servers besides: threads, or the processes
    /// of a launcher.
    ///
    /// # Errors
    /// As [`Self::config`]; a backend or a device on which there are no messages.
    pub(crate) fn config_of_mailboxes(
        &self,
        degrees: Degrees,
        num_servers: usize,
    ) -> Result<RunConfig> {
        ProductChoice::from_env()?;
        let env = RankEnv::from_env().map_err(candle_core::Error::wrap)?;
        let num_processes = env.world_size();
        let num_ranks = degrees.dp.saturating_add(num_servers);
        if let Some(backend) = self.backend {
            bail!(
                "--backend {backend} is given beside --strategy parameter-server, whose ranks are threads or a launcher's processes \
                 that send each other messages themselves\nhint: leave it out"
            );
        }
        if let Some(device) = self.device.filter(|device| *device != DeviceChoice::Cpu) {
            bail!(
                "--device {device} is given beside --strategy parameter-server, which works on the CPU\nhint: --device cpu"
            );
        }
        if self.check_collectives || self.half_sums == HalfSums::Native {
            bail!(
                "--check-collectives or --half-sums is given beside --strategy parameter-server, and is about collectives \
                 of the backends mpi and nccl\nhint: leave it out"
            );
        }
        if num_processes == 1 && num_ranks > RunConfig::MAX_THREADS {
            bail!(
                "--servers {num_servers} and {} workers are more than the {} ranks that may be threads of one process\n\
                 hint: under candle-train launch each rank is a process, of which there may be more",
                degrees.dp,
                RunConfig::MAX_THREADS
            );
        }
        if num_processes > 1 && num_processes != num_ranks {
            bail!(
                "--servers {num_servers} and {} workers are {num_ranks} ranks, but {} started {num_processes} processes\nhint: start as \
                 many, or leave --dp out",
                degrees.dp,
                env.started_by()
            );
        }
        measure_activations_by(match num_processes {
            1 => rank_allocated_bytes,
            _ => allocated_bytes,
        });
        let config = RunConfig::of_mailboxes(env, degrees);
        Ok(RunConfig {
            deadline: Duration::from_secs(self.deadline),
            rank_timeout: Duration::from_secs(self.rank_timeout),
            ..config
        })
    }

    /// What to say if `--matmul-precision high` changes nothing on this device.
    pub fn warning_of_precision(&self, device: &Device) -> Option<String> {
        let is_high = self.matmul_precision() == MatmulPrecision::High;
        let is_idle = is_high && !MatmulPrecision::matters_on(device);
        is_idle.then(|| {
            let why = match ProductChoice::from_env() {
                Ok(Some(choice)) => format!("CANDLE_TRAIN_PRODUCTS is {choice}"),
                _ => "this processor has no AMX".to_string(),
            };
            format!("--matmul-precision high changes nothing: {why}")
        })
    }

    pub(crate) fn matmul_precision(&self) -> MatmulPrecision {
        self.matmul_precision.unwrap_or_default()
    }

    /// Ranks of a run whose flags do not say how many: the processes that a launcher started, or a thread for each GPU, or one.
    ///
    /// # Errors
    /// An environment variable that means nothing.
    pub(crate) fn num_ranks(&self) -> Result<usize> {
        let env = RankEnv::from_env().map_err(candle_core::Error::wrap)?;
        if env.world_size() > 1 {
            return Ok(env.world_size());
        }
        let choice = self.device.unwrap_or(DeviceChoice::preferred());
        Ok(choice.num_devices().max(1))
    }

    fn cpu_for_mpi(&self) -> Result<Vec<Device>> {
        match self.device {
            None | Some(DeviceChoice::Cpu) => Ok(vec![Device::Cpu]),
            Some(device) => bail!(
                "the backend mpi works on the CPU, and --device is {device}\nhint: --device cpu, or --backend nccl"
            ),
        }
    }

    /// The devices that `--device` means. In a build with CUDA, a line on stderr says where a run goes that did not ask.
    fn open(
        &self,
        says: bool,
        open: impl Fn(DeviceChoice) -> Result<Vec<Device>>,
    ) -> Result<Vec<Device>> {
        let choice = self.device.unwrap_or(DeviceChoice::preferred());
        match (open(choice), self.device, choice) {
            (opened, Some(_), _) | (opened, None, DeviceChoice::Cpu) => opened,
            (Ok(devices), None, _) => {
                if says {
                    print_note(&format!("device: {}", names(&devices)));
                }
                Ok(devices)
            }
            (Err(err), None, _) => {
                let reason = err.to_string();
                let reason = reason.lines().next().unwrap_or_default();
                // Of several processes each says it: the others may have a GPU.
                print_note(&format!("device: cpu, because {reason}"));
                Ok(vec![Device::Cpu])
            }
        }
    }
}

fn names(devices: &[Device]) -> String {
    match devices.len() {
        1 => "cuda:0".to_string(),
        count => format!("cuda:0 to cuda:{}", count - 1),
    }
}
