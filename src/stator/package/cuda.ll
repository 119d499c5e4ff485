; Where a program for a GPU runs: which device it is, whether its kernels fit, and on which stream.

@device_type = internal constant i32 1

declare i32 @aoti_torch_create_cuda_stream_guard(ptr, i32, ptr) nonlazybind
declare i32 @aoti_torch_delete_cuda_stream_guard(ptr) nonlazybind
declare i32 @cuInit(i32) nonlazybind
declare i32 @cuDeviceGet(ptr, i32) nonlazybind
declare i32 @cuDeviceGetAttribute(ptr, i32, i32) nonlazybind
declare i32 @cuGetErrorString(i32, ptr) nonlazybind
declare i32 @atoi(ptr) nonlazybind

; --- which device ---

@other_device_text = text "the library is for a GPU: cuda, or cuda:1 for the second"
@no_device_text = text "there is no GPU here, or torch cannot use it"
@no_number_format = text "there is no cuda:%d here: CUDA error %d"
@capability_format = text "the library is for cards of compute capability %d.%d, and cuda:%d has %d.%d; build it there, or for it"

; The number in `cuda:1`; -1 where there is none.
define internal i32 @device_named(ptr %text, ptr %number_at) {
entry:
  store i32 -1, ptr %number_at
  %differs = call i32 @strncmp(ptr %text, ptr @cuda_text, i64 4)
  %is_cuda = icmp eq i32 %differs, 0
  br i1 %is_cuda, label %rest, label %other
rest:
  %colon_at = getelementptr i8, ptr %text, i64 4
  %colon = load i8, ptr %colon_at
  %ends = icmp eq i8 %colon, 0
  br i1 %ends, label %good, label %number
number:
  %is_colon = icmp eq i8 %colon, 58
  br i1 %is_colon, label %read, label %other
read:
  %digits = getelementptr i8, ptr %text, i64 5
  %digit = load i8, ptr %digits
  %less = sub i8 %digit, 48
  %is_digit = icmp ult i8 %less, 10
  br i1 %is_digit, label %take, label %other
take:
  %value = call i32 @atoi(ptr %digits)
  store i32 %value, ptr %number_at
  br label %good
good:
  ret i32 0
other:
  %said = call i32 @say_of(ptr %text, ptr @other_device_text)
  ret i32 %said
}

; The device that was asked for, or torch's current one, if the kernels are for such cards.
define internal i32 @settle_device(i32 %asked, ptr %device_at) {
entry:
  %tensor_at = alloca ptr
  %card_at = alloca i32
  %major_at = alloca i32
  %minor_at = alloca i32
  ; A tensor is made in either case: torch then starts CUDA, and says what is wrong with it.
  %made = call i32 @aoti_torch_empty_strided(i64 0, ptr @one, ptr @one, i32 0, i32 1, i32 %asked, ptr %tensor_at)
  %is_made = icmp eq i32 %made, 0
  br i1 %is_made, label %which, label %none
none:
  call void @stator_step_failed(ptr @no_device_text)
  ret i32 1
which:
  %tensor = load ptr, ptr %tensor_at
  call i32 @aoti_torch_get_device_index(ptr %tensor, ptr %device_at)
  call void @stator_drop_handle(ptr %tensor_at)
  %device = load i32, ptr %device_at
  call i32 @cuInit(i32 0)
  %found = call i32 @cuDeviceGet(ptr %card_at, i32 %device)
  %is_found = icmp eq i32 %found, 0
  br i1 %is_found, label %ask, label %no_number
no_number:
  %room = call ptr @room_for_text()
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %room, i64 2048, ptr @no_number_format, i32 %device, i32 %found)
  ret i32 1
ask:
  %card = load i32, ptr %card_at
  call i32 @cuDeviceGetAttribute(ptr %major_at, i32 75, i32 %card)  ; of the compute capability
  call i32 @cuDeviceGetAttribute(ptr %minor_at, i32 76, i32 %card)
  %major = load i32, ptr %major_at
  %minor = load i32, ptr %minor_at
  %tens = mul i32 %major, 10
  %its = add i32 %tens, %minor
  %ours = load i32, ptr @capability
  %fits = icmp eq i32 %its, %ours
  br i1 %fits, label %good, label %misfit
misfit:
  %other_room = call ptr @room_for_text()
  %our_major = sdiv i32 %ours, 10
  %our_minor = srem i32 %ours, 10
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %other_room, i64 2048, ptr @capability_format, i32 %our_major, i32 %our_minor, i32 %device, i32 %major, i32 %minor)
  ret i32 1
good:
  ret i32 0
}

; --- streams ---

@stream_text = text "the stream that was given"

; Make a stream torch's current one; null: the one that is.
define internal i32 @enter_stream(ptr %stream, i32 %device, ptr %guard_at) {
  store ptr null, ptr %guard_at
  %given = icmp ne ptr %stream, null
  br i1 %given, label %enter, label %good
enter:
  %code = call i32 @aoti_torch_create_cuda_stream_guard(ptr %stream, i32 %device, ptr %guard_at)
  %entered = icmp eq i32 %code, 0
  br i1 %entered, label %good, label %fail
fail:
  call void @stator_step_failed(ptr @stream_text)
  ret i32 1
good:
  ret i32 0
}

define internal void @leave_stream(ptr %guard_at) {
  %guard = load ptr, ptr %guard_at
  %held = icmp ne ptr %guard, null
  br i1 %held, label %leave, label %done
leave:
  call i32 @aoti_torch_delete_cuda_stream_guard(ptr %guard)
  br label %done
done:
  ret void
}

; --- launches ---

@launch_format = text "%s %s: CUDA error %d, %s"

; A launcher returned %code: say what it asked of CUDA, and what CUDA answered.
define internal void @stator_launch_failed(ptr %kernel, i32 %code) {
  %reason_at = alloca ptr
  store ptr @no_text, ptr %reason_at
  %step = lshr i32 %code, {STEP}
  %words_at = getelementptr ptr, ptr @launch_names, i32 %step
  %words = load ptr, ptr %words_at
  %low = shl i32 1, {STEP}
  %mask = sub i32 %low, 1
  %answer = and i32 %code, %mask
  call i32 @cuGetErrorString(i32 %answer, ptr %reason_at)
  %found = load ptr, ptr %reason_at
  %none = icmp eq ptr %found, null
  %reason = select i1 %none, ptr @no_text, ptr %found
  %room = call ptr @room_for_text()
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %room, i64 2048, ptr @launch_format, ptr %kernel, ptr %words, i32 %answer, ptr %reason)
  ret void
}
